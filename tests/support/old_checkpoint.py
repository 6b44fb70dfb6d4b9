"""Checkpoints of the formats before this one, as they were written: with torch's pickled index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from axonlaunch.checkpoint import Checkpoint, reader, step_folders


def save(run_dir: Path, state: dict[str, Any], *, step: int = 1, form: int = 2) -> Checkpoint:
    """Save a state by torch's own writer, with a manifest of format 1 or 2."""
    found = Checkpoint(step_folders.path_of(run_dir, step=step), step, 8 * step, 1, None)
    with reader.in_one_process():
        dcp.save(state, checkpoint_id=found.path, no_dist=True)
    about: dict[str, Any] = {"step": step, "samples": 8 * step, "world_size": 1, "loss": None}
    sizes = {file.name: file.stat().st_size for file in found.path.iterdir()}
    about |= {"format": form, "files": sizes}
    if form == 2:
        about |= {"eval_loss": None, "layout": "", "saved_at": 1.0}
        about["files"] = {
            name: {"bytes": size, "crc32": step_folders._crc32(found.path / name)}
            for name, size in sizes.items()
        }
    (found.path / step_folders.MANIFEST).write_text(json.dumps(about))
    return found
