"""Checkpoints of the formats before this one, as they were written: an archive of each tensor.

Those before the third have torch's pickled index.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from axonlaunch.checkpoint import Checkpoint, index, manifest, reader, step_folders


def save(run_dir: Path, state: dict[str, Any], *, step: int = 1, form: int = 2) -> Checkpoint:
    """Save a state by torch's own writer, with a manifest of format 1, 2 or 3."""
    target = Checkpoint(step_folders.path_of(run_dir, step=step), step, 8 * step, 1, None)
    with reader.in_one_process():
        dcp.save(state, checkpoint_id=target.path, no_dist=True)
    if form == 3:
        pickled = target.path / manifest.PICKLED_INDEX
        (target.path / manifest.INDEX).write_bytes(index.index_to_json(_loaded(pickled)))
        pickled.unlink()
    about: dict[str, Any] = {"step": step, "samples": 8 * step, "world_size": 1, "loss": None}
    sizes = {file.name: file.stat().st_size for file in target.path.iterdir()}
    about |= {"format": form, "files": sizes}
    if form > 1:
        about |= {"eval_loss": None, "layout": "", "saved_at": 1.0}
        about["files"] = {
            name: {"bytes": size, "crc32": step_folders._crc32(target.path / name)}
            for name, size in sizes.items()
        }
    if form == 3:
        about["sha256"] = manifest._own_sum(about)
    (target.path / step_folders.MANIFEST).write_text(json.dumps(about))
    return target


def _loaded(file: Path) -> Any:
    with file.open("rb") as stream:
        return pickle.load(stream)
