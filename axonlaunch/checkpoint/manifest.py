"""The manifest of a checkpoint: what was saved, every file with its size and checksum, and its own.

It is the whole truth of a folder: files that it does not list don't count, and a manifest that was
edited, or that mixes formats, is refused. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axonlaunch.data.origin import Origin
from axonlaunch.system.files import read_text

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
    """A saved file is not what was written.

    Attributes:
        reason: What is wrong, without what to do about it.
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
        path: Its folder.
        step: Optimizer steps done.
        samples: Samples seen: the global index of the next one.
        world_size: Ranks that wrote it.
        loss: Training loss of the last step; None if it was not known.
        eval_loss: Loss of an evaluation at this step; None without one.
        layout: Of the run that wrote it, in words.
        saved_at: Seconds since the epoch.
        tokens: Targets that counted, of all steps; None if they were not counted.
        best_eval_loss: Lowest loss of an evaluation; None without one.
        evaluations_since: Evaluations after that one.
        data: Where the data is that can only be read in turn; None: ``samples`` says it.
        origin: Description of what the rows are made of (``data.origin``); None: it is not known.
        first_row_at: Samples that were seen when the run went on from the first row of its data.
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
    best_eval_loss: float | None = None
    evaluations_since: int = 0
    data: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    first_row_at: int = 0


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes:
        checkpoint: That it describes.
        files: Name -> size and checksum; all are names of files in the folder itself.
    """

    checkpoint: Checkpoint
    files: dict[str, Sum]


def manifest_to_json(checkpoint: Checkpoint, files: Mapping[str, Sum]) -> str:
    """Return the text of a checkpoint's manifest."""
    about = {**asdict(checkpoint), "format": FORMAT}
    about["files"] = {name: asdict(files[name]) for name in sorted(files)}
    del about["path"]
    return json.dumps({**about, _OWN_SUM: _own_sum(about)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        CorruptCheckpointError: It is invalid, was edited, or has another format number. The
            message is a predicate of the folder: "has a manifest.json that ...".
        OSError: It can't be read.
    """
    try:
        about = json.loads(read_text(folder / MANIFEST, at_most=_LARGEST))
        if _number(about["format"]) != FORMAT:
            message = f"has format {about['format']}; this version reads only format {FORMAT}"
            raise CorruptCheckpointError(message)
        manifest = Manifest(_checkpoint_of(folder, about), _sums(about))
    except _NOT_UNDERSTOOD:
        raise CorruptCheckpointError(f"has a {MANIFEST} that can't be understood") from None
    _refuse_edited(manifest, about)
    return manifest


def is_name(name: object) -> bool:
    """Whether something is a name of a file in a folder, leads nowhere else, and can be shown."""
    if not isinstance(name, str) or name in ("", os.curdir, os.pardir):
        return False
    return name.isprintable() and not any(mark in name for mark in "/\\")


def _refuse_edited(manifest: Manifest, about: Mapping[str, Any]) -> None:
    """Hold a manifest against itself.

    Raises:
        CorruptCheckpointError: It was edited.
    """
    for name in manifest.files:
        if not is_name(name):
            raise CorruptCheckpointError(
                f"has a {MANIFEST} that names {name!r}, which is not a file name"
            )
    if about.get(_OWN_SUM) != _own_sum(about):
        raise CorruptCheckpointError(
            f"has a {MANIFEST} that is not what was written (its SHA-256 differs)"
        )
    if INDEX not in manifest.files:
        raise CorruptCheckpointError(f"has a {MANIFEST} that does not list {INDEX}")


def _own_sum(about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all that a manifest says but for this."""
    rest = {key: value for key, value in about.items() if key != _OWN_SUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _checkpoint_of(folder: Path, about: Mapping[str, Any]) -> Checkpoint:
    """Type what a manifest says of the checkpoint.

    Raises:
        TypeError: A value is of another type.
        KeyError: One is missing.
    """
    layout = about.get("layout", "")
    if not isinstance(layout, str) or not layout.isprintable():
        raise TypeError("layout")
    return Checkpoint(
        folder,
        step=_number(about["step"]),
        samples=_number(about["samples"]),
        world_size=_number(about["world_size"], above=0),
        loss=_float(about["loss"]),
        eval_loss=_float(about.get("eval_loss")),
        layout=layout,
        saved_at=_float(about.get("saved_at", 0.0)) or 0.0,
        tokens=None if about.get("tokens") is None else _number(about["tokens"]),
        best_eval_loss=_float(about.get("best_eval_loss")),
        evaluations_since=_number(about.get("evaluations_since", 0)),
        data=_data(about.get("data")),
        origin=_origin(about.get("origin")),
        first_row_at=_number(about.get("first_row_at", 0)),
    )


def _data(value: Any) -> dict[str, Any] | None:
    """Type where the data is.

    Raises:
        TypeError: It is of another type.
        KeyError: Some of it is missing.
    """
    if value is None:
        return None
    if not isinstance(value["dataset"], str):
        raise TypeError("data")
    numbers = {key: _number(value[key]) for key in ("samples", "epoch")}
    return {**numbers, "dataset": value["dataset"]}


def _origin(value: Any) -> dict[str, Any] | None:
    """Type the description of what rows are made of.

    Raises:
        TypeError: It is of another type.
        KeyError: Part of it is missing.
    """
    return None if value is None else Origin.from_dict(value).to_dict()


def _sums(about: Mapping[str, Any]) -> dict[str, Sum]:
    """Return the files of a manifest.

    Raises:
        TypeError: A value has the wrong type.
        KeyError: A value is missing.
    """
    return {
        name: Sum(_number(entry["bytes"]), _number(entry["crc32"]))
        for name, entry in about["files"].items()
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
