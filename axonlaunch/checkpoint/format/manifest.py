"""Reads and writes the manifest of a checkpoint.

The manifest describes the checkpoint and lists every file with its size and checksum, and it has a
checksum of itself. Files that it does not list are ignored; an edited manifest is refused. Nothing
here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from axonlaunch.data.datasets.origin import Origin
from axonlaunch.system.storage.files import read_text

FORMAT = 4
"""Number of the checkpoint format; checkpoints with another number are refused."""
MANIFEST = "manifest.json"
INDEX = "index.json"
TORCH_INDEX = ".metadata"
"""Index for ``torch.distributed.checkpoint.FileSystemReader``: a pickle, never read here."""

_LARGEST = 256 << 20
_OWN_SUM = "sha256"
_NOT_UNDERSTOOD = (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(RecursionError, OverflowError),
)


class CorruptCheckpointError(Exception):
    """A saved file was changed, damaged or deleted.

    Attributes:
        reason: Description of the fault, without the remedy.
    """

    def __init__(self, reason: str, *, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason


@dataclass(frozen=True)
class Sum:
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: Folder of the checkpoint.
        step: Number of completed optimizer steps.
        samples: Number of samples seen, which is the global index of the next sample.
        world_size: Number of ranks that wrote it.
        loss: Training loss of the last step; None if unknown.
        eval_loss: Loss of the evaluation at this step; None without an evaluation.
        layout: Layout of the run that wrote it, in words.
        saved_at: Time of the save in seconds since 1970.
        tokens: Number of counted targets over all steps; None if unknown.
        metrics: Metrics of the evaluation at this step, by name.
        best_metric: Name of the metric, or loss, by which evaluations are compared.
        best_value: Best value of it so far; None without an evaluation.
        evaluations_since: Number of evaluations after the best one.
        data: Position in data that can only be read in order; None if ``samples`` is the position.
        origin: Description of the source of the rows (``data.datasets.origin``); None if unknown.
        first_row_at: Value of ``samples`` when the run last restarted at the first row of its data.
    """

    path: Path
    step: int
    samples: int
    world_size: int
    loss: float | None
    eval_loss: float | None = None
    layout: str = ""
    saved_at: float = 0.0
    tokens: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    best_metric: str = "loss"
    best_value: float | None = None
    evaluations_since: int = 0
    data: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    first_row_at: int = 0


@dataclass(frozen=True)
class Manifest:
    """Content of a manifest.

    Attributes:
        checkpoint: The described checkpoint.
        files: Size and checksum by file name; all files are in the folder itself.
    """

    checkpoint: Checkpoint
    files: dict[str, Sum]


def manifest_to_json(checkpoint: Checkpoint, files: Mapping[str, Sum]) -> str:
    """Return the text of a checkpoint's manifest."""
    content = {**asdict(checkpoint), "format": FORMAT}
    content["files"] = {name: asdict(files[name]) for name in sorted(files)}
    del content["path"]
    return json.dumps({**content, _OWN_SUM: _own_sum(content)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        CorruptCheckpointError: The manifest is invalid, was edited, or has an unknown format
            number. The message is a predicate of the folder: "has a manifest.json that ...".
        OSError: The file can't be read.
    """
    try:
        content = json.loads(read_text(folder / MANIFEST, at_most=_LARGEST))
        if _number(content["format"]) != FORMAT:
            message = f"has format {content['format']}; this version reads only format {FORMAT}"
            raise CorruptCheckpointError(message)
        manifest = Manifest(_checkpoint_of(folder, content), _sums(content))
    except _NOT_UNDERSTOOD:
        raise CorruptCheckpointError(f"has a {MANIFEST} that can't be understood") from None
    _refuse_edited(manifest, content)
    return manifest


def is_name(name: object) -> bool:
    """Return whether a value is a printable file name without folders."""
    if not isinstance(name, str) or name in ("", os.curdir, os.pardir):
        return False
    return name.isprintable() and not any(mark in name for mark in "/\\")


def _refuse_edited(manifest: Manifest, content: Mapping[str, Any]) -> None:
    """Check the names and the checksum of a manifest.

    Raises:
        CorruptCheckpointError: The manifest was edited.
    """
    for name in manifest.files:
        if not is_name(name):
            raise CorruptCheckpointError(
                f"has a {MANIFEST} that names {name!r}, which is not a file name"
            )
    if content.get(_OWN_SUM) != _own_sum(content):
        raise CorruptCheckpointError(
            f"has a {MANIFEST} that is not what was written (its SHA-256 differs)"
        )
    if INDEX not in manifest.files:
        raise CorruptCheckpointError(f"has a {MANIFEST} that does not list {INDEX}")


def _own_sum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content without this checksum."""
    rest = {key: value for key, value in content.items() if key != _OWN_SUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _checkpoint_of(folder: Path, content: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint that a manifest describes.

    Raises:
        TypeError: A value has the wrong type.
        KeyError: A value is missing.
    """
    return Checkpoint(
        folder,
        step=_number(content["step"]),
        samples=_number(content["samples"]),
        world_size=_number(content["world_size"], above=0),
        loss=_float(content["loss"]),
        eval_loss=_float(content.get("eval_loss")),
        layout=_text(content.get("layout", "")),
        saved_at=_float(content.get("saved_at", 0.0)) or 0.0,
        tokens=None if content.get("tokens") is None else _number(content["tokens"]),
        metrics=_metrics(content.get("metrics", {})),
        best_metric=_text(content.get("best_metric", "loss")),
        best_value=_float(content.get("best_value")),
        evaluations_since=_number(content.get("evaluations_since", 0)),
        data=_data(content.get("data")),
        origin=_origin(content.get("origin")),
        first_row_at=_number(content.get("first_row_at", 0)),
    )


def _text(value: Any) -> str:
    """Return a printable text.

    Raises:
        TypeError: The value is not a text, or has characters that can't be printed.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError("text")
    return value


def _metrics(value: Any) -> dict[str, float | None]:
    """Return the metrics of an evaluation.

    Raises:
        TypeError: A name or a value has the wrong type.
        AttributeError: The value is not a mapping.
    """
    return {_text(name): _float(number) for name, number in value.items()}


def _data(value: Any) -> dict[str, Any] | None:
    """Return the position in the data.

    Raises:
        TypeError: A value has the wrong type.
        KeyError: A value is missing.
    """
    if value is None:
        return None
    if not isinstance(value["dataset"], str):
        raise TypeError("data")
    numbers = {key: _number(value[key]) for key in ("samples", "epoch", "position")}
    return {**numbers, "dataset": value["dataset"]}


def _origin(value: Any) -> dict[str, Any] | None:
    """Return the description of the source of the rows.

    Raises:
        TypeError: A value has the wrong type.
        KeyError: A value is missing.
    """
    return None if value is None else Origin.from_dict(value).to_dict()


def _sums(content: Mapping[str, Any]) -> dict[str, Sum]:
    """Return the files of a manifest.

    Raises:
        TypeError: A value has the wrong type.
        KeyError: A value is missing.
    """
    return {
        name: Sum(_number(entry["bytes"]), _number(entry["crc32"]))
        for name, entry in content["files"].items()
    }


def _number(value: Any, *, above: int = -1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= above:
        raise TypeError(value)
    return value


def _float(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(value)
    return float(value)
