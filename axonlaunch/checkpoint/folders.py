"""The folders ``checkpoints/step_<K>`` of a run: which are whole, and which are to be kept.

A folder of that name is complete: it is written under another name, synced to disk, and renamed
last. In a remote place, which renames nothing, it is complete once it has its manifest, which is
written last and deleted first. Nothing here imports torch, or opens what a run saved.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from zlib_ng.zlib_ng import crc32

from axonlaunch.checkpoint.storage import CHECKPOINTS, delete, is_remote, kept_by, sizes
from axonlaunch.disk import free_bytes

FORMAT = 2
MIB = 2**20
MANIFEST = "manifest.json"
PARTIAL = ".partial"
_NAME = "step_"
_CHUNK = 1 << 22

CHANGED = "is not what was written (its CRC-32 differs)"
"""What is said of a file that ``damage`` names."""


class DamagedError(Exception):
    """A saved file is not what was written."""


@dataclass(frozen=True)
class Sum:
    """A file's size in bytes and, but for those of format 1, its CRC-32."""

    bytes: int
    crc32: int | None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: Its folder.
        step: Optimizer steps done.
        samples: Samples seen: the global index of the next one.
        world_size: Ranks that wrote it.
        loss: Training loss of the last step; None if it was not known.
        eval_loss: Loss of the last evaluation; None without one.
        layout: Of the run that wrote it, in words.
        saved_at: Seconds since the epoch.
    """

    path: Path
    step: int
    samples: int
    world_size: int
    loss: float | None
    eval_loss: float | None = None
    layout: str = ""
    saved_at: float = 0.0


@dataclass(frozen=True)
class Retention:
    """Which checkpoints outlive newer ones.

    Attributes:
        newest: So many.
        every: Those of steps that it divides; 0: no others.
        best: So many with the lowest evaluation loss.
    """

    newest: int
    every: int = 0
    best: int = 0


def path_of(run_dir: Path, *, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return run_dir / CHECKPOINTS / f"{_NAME}{step}"


def partial_of(folder: Path) -> Path:
    """Return the name that a checkpoint's folder has while it is written or deleted."""
    return folder if is_remote(folder) else folder.with_name(folder.name + PARTIAL)


def prepare(folder: Path) -> None:
    """Make room for a checkpoint that is to be written.

    Raises:
        OSError: The disk has less room than the last one took.
    """
    run_dir = folder.parent.parent
    sweep_partial(run_dir)
    if is_remote(folder):
        if folder.exists():  # the same step, saved again after a resume
            _unmake(folder)
        return
    before = latest(run_dir)
    if before is None:  # whether there is room for the first was asked before the run
        return
    needed = sum(file.bytes for file in files(before).values())
    _, free = free_bytes(run_dir)
    if needed > free:
        told = f"it takes {needed / MIB:,.0f} MiB, and the disk has {free / MIB:,.0f} MiB"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {told}")


def latest(run_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, None where there is none."""
    found = listed(run_dir)
    return found[-1] if found else None


def resolve(path: Path) -> Checkpoint | None:
    """Return the checkpoint that a path means: itself, or a run's newest; None where neither."""
    return read(path) if (path / MANIFEST).is_file() else latest(path)


def listed(run_dir: Path) -> list[Checkpoint]:
    """Return a run's complete checkpoints, by step."""
    found = [read(folder) for folder in _folders(run_dir)]
    return sorted((c for c in found if c is not None), key=lambda c: c.step)


def read(folder: Path) -> Checkpoint | None:
    """Read a manifest; None where the folder is no complete checkpoint that is understood."""
    found = _looked_at(folder)
    return found if isinstance(found, Checkpoint) else None


def fault(folder: Path) -> str | None:
    """Say in words what a folder lacks of a complete checkpoint; None if nothing shows.

    Sizes are looked at, contents are not: ``damage`` reads them.
    """
    found = _looked_at(folder)
    return found if isinstance(found, str) else None


def _looked_at(folder: Path) -> Checkpoint | str:
    """Return a complete checkpoint, or what the folder lacks of one."""
    try:
        about = _manifest(folder)
        if about["format"] > FORMAT:
            return f"is of format {about['format']}, and this version knows up to {FORMAT}"
        found = _described(folder, about)
        present = sizes(folder)
        for name, expected in _sums(about).items():
            if name not in present:
                return f"lacks {name}"
            if present[name] != expected.bytes:
                return f"has {present[name]} bytes of {name} instead of {expected.bytes}"
    except OSError as error:
        return f"lacks {MANIFEST}" if isinstance(error, FileNotFoundError) else str(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"has a {MANIFEST} that can't be understood"
    return found


def damaged(path: Path, *, after: Checkpoint | None = None) -> dict[Path, str]:
    """Return folders that should be checkpoints and are not, with what they lack, by step.

    Args:
        path: A run's folder, or one of a checkpoint.
        after: Leave out what is older.
    """
    since = -1 if after is None else after.step
    given = path.name.startswith(_NAME) and not (path / CHECKPOINTS).exists()
    found = [path] if given else sorted(_folders(path), key=_step)
    found = [one for one in found if _step(one) > since and (given or not _is_begun(one))]
    return {one: reason for one in found if (reason := fault(one))}


def damage(checkpoint: Checkpoint, *, part: int = 0, parts: int = 1) -> list[str]:
    """Read a checkpoint's files again and return the names of those that have changed.

    Args:
        checkpoint: Whose.
        part: Of the files, which share is read.
        parts: Shares that they are divided into: a rank each, of which as many as wrote them get
            their own.
    """
    expected = sorted(files(checkpoint).items(), key=lambda one: _order(one[0]))
    return [
        name
        for name, known in expected[part::parts]
        if known.crc32 is not None and _crc32(checkpoint.path / name) != known.crc32
    ]


def files(checkpoint: Checkpoint) -> dict[str, Sum]:
    """Return a checkpoint's files."""
    return _sums(_manifest(checkpoint.path))


def prune(run_dir: Path, retention: Retention) -> None:
    """Delete the checkpoints that are not to be kept, but for those that someone reads."""
    for checkpoint in superseded(listed(run_dir), retention):
        if is_remote(checkpoint.path):
            _unmake(checkpoint.path)
            continue
        with (checkpoint.path / MANIFEST).open() as manifest:
            if not _locked(manifest, fcntl.LOCK_EX):
                continue
            # Renamed first: a folder of a checkpoint's name is never half deleted.
            doomed = partial_of(checkpoint.path)
            checkpoint.path.rename(doomed)
        delete(doomed)


def superseded(found: Sequence[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Return which of a run's checkpoints, given by step, are not to be kept."""
    judged = [c for c in found if c.eval_loss is not None]
    best = sorted(judged, key=lambda c: (c.eval_loss, -c.step))[: retention.best]
    return [
        c
        for c in found[: -retention.newest]
        if c not in best and not (retention.every and c.step % retention.every == 0)
    ]


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Keep a checkpoint from being deleted by the run that wrote it; a remote one has no lock.

    Raises:
        DamagedError: It is gone already.
    """
    try:
        with (checkpoint.path / MANIFEST).open() as manifest:
            if not is_remote(checkpoint.path):
                _locked(manifest, fcntl.LOCK_SH)
            yield
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename}: it is gone") from None


def sweep_partial(run_dir: Path) -> list[str]:
    """Delete what interrupted saves left; return the names."""
    if is_remote(run_dir):
        left = [folder for folder in _folders(run_dir) if _is_begun(folder)]
    else:
        left = [*(run_dir / CHECKPOINTS).glob(f"{_NAME}*{PARTIAL}")]
    for folder in left:
        with suppress(OSError):
            delete(folder)
    return sorted(folder.name for folder in left)


def complete(partial: Path, checkpoint: Checkpoint, written: Mapping[str, Sum]) -> None:
    """Describe files that are written and synced, and give their folder its name."""
    about = {**asdict(checkpoint), "format": FORMAT}
    about["files"] = {name: asdict(written[name]) for name in sorted(written)}
    del about["path"]
    manifest = partial / MANIFEST
    text = json.dumps(about, indent=1)
    if is_remote(partial):
        manifest.write_text(text)
        return
    with manifest.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    folder = checkpoint.path
    if folder.exists():  # the same step, saved again after a resume
        replaced = folder.with_name(f"{folder.name}.replaced{PARTIAL}")
        folder.rename(replaced)
        partial.rename(folder)
        delete(replaced)
    else:
        partial.rename(folder)
    _sync_folder(folder.parent)


def _is_begun(folder: Path) -> bool:
    """Return whether a remote folder is what a save that was interrupted has left."""
    return is_remote(folder) and not (folder / MANIFEST).is_file()


def _unmake(folder: Path) -> None:
    """Delete a remote checkpoint, which is none from the first moment on."""
    (folder / MANIFEST).unlink()
    delete(folder)


def _sums(manifest: Mapping[str, Any]) -> dict[str, Sum]:
    return {
        name: Sum(known, None) if isinstance(known, int) else Sum(**known)
        for name, known in manifest["files"].items()
    }


def _folders(run_dir: Path) -> list[Path]:
    found = (kept_by(run_dir) / CHECKPOINTS).glob(f"{_NAME}*")
    return [folder for folder in found if _step(folder) >= 0]


def _step(folder: Path) -> int:
    """Return the step of a folder's name; -1 where it has none."""
    number = folder.name.removeprefix(_NAME)
    return int(number) if number.isdecimal() else -1


def _manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return content


def _described(folder: Path, about: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        folder,
        step=about["step"],
        samples=about["samples"],
        world_size=about["world_size"],
        loss=about["loss"],
        eval_loss=about.get("eval_loss"),
        layout=about.get("layout", ""),
        saved_at=about.get("saved_at", 0.0),
    )


def _order(name: str) -> tuple[bool, int, str]:
    """Put ranks' files by number, and the index, which a load has read by then, last."""
    return name.startswith("."), len(name), name


def _crc32(file: Path) -> int:
    """Return a file's CRC-32; -1 where it can't be read."""
    found = 0
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with file.open("rb") as stream:
            while count := stream.readinto(buffer):
                found = crc32(buffer[:count], found)
    except OSError:
        return -1
    return found


def _locked(manifest: IO[str], kind: int) -> bool:
    """Say whether an open manifest could be locked; where the disk has no locks, it could."""
    try:
        fcntl.flock(manifest, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
