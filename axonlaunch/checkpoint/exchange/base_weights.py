"""Reads and hashes the pretrained weights that an adapter's checkpoints leave out.

``base.json``, next to the checkpoints, has the SHA-256 of each weight file. A run can't resume with
other weights, and its checkpoints can't be merged with them or sampled on them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonlaunch.checkpoint.format import storage
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.precision import NUMBER_FORMATS
from axonlaunch.models.source_of import source_of
from axonlaunch.system.storage.files import hub_blob, inside_folder, open_regular, read_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BASE = "base.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 20
_BATCH_BYTES = 1 << 30
"""Bytes read per batch; a batch holds at least one tensor."""


def record_base(config: RunConfig) -> None:
    """Write the hashes of the pretrained weights if the run's checkpoints leave weights out."""
    if not config.saves_frozen:
        (storage.root(config) / BASE).write_text(json.dumps(_digests(config), indent=1) + "\n")


def find_base_problems(config: RunConfig, run_dir: Path) -> Iterator[ConfigIssue]:
    """Yield a problem if checkpoints would be used with other pretrained weights.

    Args:
        config: Configuration of the run that resumes, or of the checkpoints.
        run_dir: Folder of the checkpoints and ``base.json``.
    """
    if config.saves_frozen:
        return
    path = config.model_path
    try:
        recorded = json.loads(read_text(run_dir / BASE, at_most=_LARGEST))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = (
            f"{run_dir / BASE}, the hashes of the weights it began with, can't be read: {error}"
        )
        yield ConfigIssue("model.path", message, path)
        return
    current = _digests(config)["files"]
    if recorded != current:
        names = {*recorded, *current}
        changed = sorted(name for name in names if recorded.get(name) != current.get(name))
        message = f"{changed[0]} changed since the run in {run_dir} began (its SHA-256 differs)"
        yield ConfigIssue("model.path", f"{message}; use the same weights", path)


def left_out(config: RunConfig) -> set[str]:
    """Return the names of the parameters that a run's checkpoints leave out."""
    if config.saves_frozen:
        return set()
    from axonlaunch.models.adapters.lora import not_saved
    from axonlaunch.models.build import on_meta

    return not_saved(config, on_meta(config, seed=config.seed))


def kept_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype that a run uses for the weights that its checkpoints leave out."""
    from axonlaunch.models.torch_dtypes import torch_dtype

    return torch_dtype(NUMBER_FORMATS[config.train.param_dtype])


def values_of(config: RunConfig, saved: Tensor) -> Tensor:
    """Return the values of a saved parameter, which may be quantized."""
    from axonlaunch.models.tensors.packed_blocks import format_of

    stored = format_of(saved)
    return saved if stored is None else stored.dequantize(saved, kept_dtype(config))


def base_tensors(
    config: RunConfig, names: Sequence[str], run_dir: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield full pretrained tensors by name, with few in memory at the same time.

    Weights of a quantized base have the values that the run computes with.

    Args:
        config: Configuration of a run whose checkpoints leave them out.
        names: Names of the parameters to read.
        run_dir: Folder of the checkpoints and ``base.json``.

    Raises:
        ConfigError: The weights are not those that the run began with.
    """
    if not names:
        return
    if problems := [*find_base_problems(config, run_dir)]:
        raise ConfigError(problems)
    import torch
    import torch.distributed.checkpoint as dcp

    from axonlaunch.checkpoint.exchange.safetensors import Reader
    from axonlaunch.checkpoint.loading.reader import in_one_process
    from axonlaunch.models.adapters.quantized_base import quantized_names
    from axonlaunch.models.build import on_meta

    formats, dtype = quantized_names(on_meta(config, seed=config.seed)), kept_dtype(config)
    source = Reader(_folder(config), config.model, packed=formats)
    shapes = source.shapes()
    batch: dict[str, Tensor] = {}
    for number, name in enumerate(names, 1):
        saved = torch.uint8 if name in source.packed else torch.float32
        batch[name] = torch.empty(shapes[name], dtype=saved)
        if number == len(names) or sum(t.nbytes for t in batch.values()) > _BATCH_BYTES:
            with in_one_process():
                dcp.load({"model": batch}, storage_reader=source, no_dist=True)
            for read, tensor in batch.items():
                stored = None if read in source.packed else formats.get(read)
                packed = tensor if stored is None else stored.quantize(tensor)
                yield read, values_of(config, packed).to(dtype)
            batch = {}


def _digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return ``{"files": {name: SHA-256}}`` of the pretrained weights.

    Files in the Hub's cache are named by their SHA-256, so they are not read.
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
    key_and_path = source_of(config).initial_weights()
    assert key_and_path is not None
    return Path(key_and_path[1])
