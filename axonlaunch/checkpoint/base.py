"""The pretrained weights beside a run's adapter: checkpoints refer to them by their hashes.

``base.json``, beside the checkpoints, has the SHA-256 of each file of them; a run that is to resume
on other weights is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonlaunch.checkpoint import storage
from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.config.precision import FORMATS
from axonlaunch.system.files import hub_blob, inside_folder, open_regular, read_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BASE = "base.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 20
_AT_ONCE = 1 << 30
"""Bytes of the base's tensors that are read at once, at least a tensor."""


def record_base(config: RunConfig) -> None:
    """Write the hashes of the weights that a run's checkpoints leave out, if they leave any out."""
    if not config.saves_frozen:
        (storage.root(config) / BASE).write_text(json.dumps(_digests(config), indent=1) + "\n")


def find_base_problems(config: RunConfig, run_dir: Path) -> Iterator[ConfigIssue]:
    """Yield why a run can't resume from another's checkpoints: its base is not theirs.

    Args:
        config: Of the run that is to resume.
        run_dir: Where the checkpoints and ``base.json`` are.
    """
    if config.saves_frozen:
        return
    path = getattr(config.model, "path", None)
    try:
        recorded = json.loads(read_text(run_dir / BASE, at_most=_LARGEST))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = (
            f"{run_dir / BASE}, the hashes of the weights it began with, can't be read: {error}"
        )
        yield ConfigIssue("model.path", message, path)
        return
    now = _digests(config)["files"]
    if recorded != now:
        changed = sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name))
        message = f"{changed[0]} is not what the run in {run_dir} began with (its SHA-256 differs)"
        yield ConfigIssue("model.path", f"{message}; use the same weights", path)


def left_out(config: RunConfig) -> set[str]:
    """Return the names of parameters that a run's checkpoints leave out."""
    if config.saves_frozen:
        return set()
    from axonlaunch.models.build import on_meta
    from axonlaunch.models.lora import not_saved

    return not_saved(config, on_meta(config, seed=config.seed))


def kept_dtype(config: RunConfig) -> torch.dtype:
    """Return the type in which a run keeps the weights that its checkpoints leave out."""
    from axonlaunch.models.torch_dtypes import torch_dtype

    return torch_dtype(FORMATS[config.train.param_dtype])


def base_tensors(config: RunConfig, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a base's parameters, whole, a few in memory at once.

    Args:
        config: Of a run whose checkpoints leave them out.
        names: Which, by our names.
    """
    if not names:
        return
    import torch
    import torch.distributed.checkpoint as dcp

    from axonlaunch.checkpoint.reader import in_one_process
    from axonlaunch.checkpoint.safetensors import Reader

    shapes = Reader(_folder(config), config.model).shapes()
    batch: dict[str, Tensor] = {}
    for number, name in enumerate(names, 1):
        batch[name] = torch.empty(shapes[name])
        if number == len(names) or sum(t.nbytes for t in batch.values()) > _AT_ONCE:
            with in_one_process():
                source = Reader(_folder(config), config.model)
                dcp.load({"model": batch}, storage_reader=source, no_dist=True)
            yield from ((name, tensor.to(kept_dtype(config))) for name, tensor in batch.items())
            batch = {}


def _digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return ``{"files": {name: SHA-256}}`` of a base's weights.

    The Hub's cache names a file by it.
    """
    files = {}
    for file in sorted(_folder(config).glob("*.safetensors")):
        blob = hub_blob(file)
        if blob is not file and _DIGEST.fullmatch(blob.name):
            files[file.name] = blob.name
        else:
            with open_regular(inside_folder(file)) as content:
                files[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return {"files": files}


def _folder(config: RunConfig) -> Path:
    from axonlaunch.models.build import initial_weights

    named = initial_weights(config)
    assert named is not None
    return Path(named[1])
