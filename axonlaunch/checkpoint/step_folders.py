"""The folders ``checkpoints/step_<K>`` of a run: which are whole, and which are to be kept.

A folder of that name is complete: it is written under another name, synced to disk, and renamed
last. In a remote place, which renames nothing, it is complete once it has its manifest, which is
written last and deleted first. Nothing here imports torch, or opens what a run saved.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from zlib_ng.zlib_ng import crc32

from axonlaunch.checkpoint import manifest
from axonlaunch.checkpoint.manifest import MANIFEST, Checkpoint, CorruptCheckpointError, Sum
from axonlaunch.checkpoint.storage import CHECKPOINTS, delete, is_remote, kept_by, sizes
from axonlaunch.system.disk import free_bytes
from axonlaunch.system.files import NotRegularError, TooLargeError, create_file, open_regular
from axonlaunch.system.formatting import MIB

PARTIAL = ".partial"
_NAME = "step_"
_CHUNK = 1 << 22

CHANGED = "is not what was written (its CRC-32 differs)"
"""What is said of a file that ``damage`` names."""


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
    """Make space for a checkpoint that is to be written.

    Raises:
        OSError: The disk has less free space than the last one took.
    """
    run_dir = folder.parent.parent
    sweep_partial(run_dir)
    if is_remote(folder):
        if sizes(folder):  # the same step, saved again after a resume
            _unmake(folder)
        return
    before = latest(run_dir)
    if before is not None:  # whether there is space for the first was asked before the run
        needed = sum(file.bytes for file in files(before).values())
        _, free = free_bytes(run_dir)
        if needed > free:
            message = f"it takes {needed / MIB:,.0f} MiB, and the disk has {free / MIB:,.0f} MiB"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {message}")


def latest(run_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, None where there is none."""
    checkpoints = list_checkpoints(run_dir)
    return checkpoints[-1] if checkpoints else None


def find_checkpoint(path: Path, *, step: int | None = None) -> Checkpoint | None:
    """Return the checkpoint that a path means: itself, or a run's newest, or its one of a step.

    None where neither. A link that a user names is followed; those that a folder holds are not.

    Raises:
        OSError: It can't be listed or read.
    """
    path = follow_link(path)
    if MANIFEST in sizes(path):
        return read_checkpoint(path)
    return latest(path) if step is None else read_checkpoint(path_of(kept_by(path), step=step))


def follow_link(path: Path) -> Path:
    """Return where a path that a user wrote leads."""
    return path.resolve() if not is_remote(path) and path.is_symlink() else path


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return a run's complete checkpoints, by step.

    Raises:
        OSError: They can't be listed or read.
    """
    checkpoints = [read_checkpoint(folder) for folder in _folders(run_dir)]
    return sorted((c for c in checkpoints if c is not None), key=lambda c: c.step)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read a manifest; None where the folder is no complete checkpoint that is understood.

    Raises:
        OSError: It can't be read.
    """
    checkpoint = _looked_at(folder)
    return checkpoint if isinstance(checkpoint, Checkpoint) else None


def fault(folder: Path) -> str | None:
    """Say in words what a folder lacks of a complete checkpoint; None if nothing shows.

    Sizes are looked at, contents are not: ``damage`` reads them.

    Raises:
        OSError: It can't be read.
    """
    checkpoint = _looked_at(folder)
    return checkpoint if isinstance(checkpoint, str) else None


def _looked_at(folder: Path) -> Checkpoint | str:
    """Return a complete checkpoint, or what the folder lacks of one.

    Raises:
        OSError: It can't be read, which says nothing of what is in it.
    """
    if not is_remote(folder) and folder.is_symlink():
        return "is a link"
    present = sizes(folder)
    if MANIFEST not in present:
        return f"lacks {MANIFEST}"
    try:
        about = manifest.read_manifest(folder)
    except FileNotFoundError:  # deleted since it was listed
        return f"lacks {MANIFEST}"
    except NotRegularError:
        return f"has {MANIFEST}, which is not a regular file"
    except TooLargeError:
        return f"has a {MANIFEST} that is larger than any is"
    except CorruptCheckpointError as error:
        return str(error)
    if _step(folder) not in (-1, about.checkpoint.step):
        return f"has a {MANIFEST} of step {about.checkpoint.step}"
    for name, expected in about.files.items():
        if name not in present:
            return f"lacks {name}"
        size = present[name]
        if size is None:
            return f"has {name}, which is not a regular file"
        if size != expected.bytes:
            return f"has {size} bytes of {name} instead of {expected.bytes}"
    return about.checkpoint


def corrupt_checkpoints(path: Path, *, after: Checkpoint | None = None) -> dict[Path, str]:
    """Return folders that should be checkpoints and are not, with what they lack, by step.

    Args:
        path: A run's folder, or one of a checkpoint.
        after: Leave out what is older.
    """
    since = -1 if after is None else after.step
    path = follow_link(path)
    is_one = path.name.startswith(_NAME) and CHECKPOINTS not in sizes(path)
    folders = [path] if is_one else sorted(_folders(path), key=_step)
    folders = [
        folder for folder in folders if _step(folder) > since and (is_one or not _is_begun(folder))
    ]
    return {folder: reason for folder in folders if (reason := fault(folder))}


def damage(checkpoint: Checkpoint, *, part: int = 0, parts: int = 1) -> list[str]:
    """Read a checkpoint's files again and return the names of those that have changed.

    Args:
        checkpoint: Whose.
        part: Of the files, which share is read.
        parts: Shares that they are divided into: a rank each, of which as many as wrote them get
            their own.
    """
    expected = sorted(files(checkpoint).items(), key=lambda item: _order(item[0]))
    share = expected[part::parts]
    return [name for name, known in share if _crc32(checkpoint.path / name) != known.crc32]


def files(checkpoint: Checkpoint) -> dict[str, Sum]:
    """Return a checkpoint's files."""
    return manifest.read_manifest(checkpoint.path).files


def prune(run_dir: Path, retention: Retention) -> dict[Path, OSError]:
    """Delete the checkpoints that are not to be kept, but for those that someone reads.

    Returns:
        Those that could not be deleted, each with the reason.

    Raises:
        OSError: They can't be listed or read.
    """
    left: dict[Path, OSError] = {}
    for checkpoint in list_superseded(list_checkpoints(run_dir), retention):
        try:
            _delete_unless_read(checkpoint.path)
        except FileNotFoundError:
            continue  # somebody else has deleted it
        except OSError as error:
            left[checkpoint.path] = error
    return left


def _delete_unless_read(folder: Path) -> None:
    """Delete a checkpoint that nobody reads now."""
    if is_remote(folder):
        _unmake(folder)
        return
    with open_regular(folder / MANIFEST) as stream:
        if not _can_lock(stream, fcntl.LOCK_EX):
            return
        # Renamed first: a folder of a checkpoint's name is never half deleted.
        doomed = partial_of(folder)
        folder.rename(doomed)
    delete(doomed)


def list_superseded(checkpoints: Sequence[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Return which of a run's checkpoints, given by step, are not to be kept."""
    judged = [
        (c.eval_loss, -c.step, c)
        for c in checkpoints
        if c.eval_loss is not None and math.isfinite(c.eval_loss)
    ]
    best = [c for *_, c in sorted(judged, key=lambda entry: entry[:2])[: retention.best]]
    return [
        c
        for c in checkpoints[: -retention.newest]
        if c not in best and not (retention.every and c.step % retention.every == 0)
    ]


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Keep a checkpoint from being deleted by the run that wrote it; a remote one has no lock.

    Raises:
        CorruptCheckpointError: It is gone already.
    """
    try:
        with open_regular(checkpoint.path / MANIFEST) as stream:
            if not is_remote(checkpoint.path):
                _can_lock(stream, fcntl.LOCK_SH)
            yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{error.filename}: it is gone") from None


def sweep_partial(run_dir: Path) -> list[str]:
    """Delete what interrupted saves left; return the names of what is gone."""
    if is_remote(run_dir):
        left = [folder for folder in _folders(run_dir) if _is_begun(folder)]
    else:
        checkpoints = run_dir / CHECKPOINTS
        names = [name for name in sizes(checkpoints) if name.startswith(_NAME)]
        left = [checkpoints / name for name in names if name.endswith(PARTIAL)]
    deleted = []
    for folder in left:
        with suppress(OSError):
            delete(folder)
            deleted.append(folder.name)
    return sorted(deleted)


def complete(partial: Path, checkpoint: Checkpoint, written: Mapping[str, Sum]) -> None:
    """Describe files that are written and synced, and give their folder its name.

    A reader finds either no checkpoint or all of it: the manifest is written last, and the folder
    is renamed in one step.

    Args:
        partial: The folder that was written to.
        checkpoint: What it becomes; one of the same step is replaced.
        written: Size and checksum of each file, by name.
    """
    text = manifest.manifest_to_json(checkpoint, written)
    if is_remote(partial):
        (partial / MANIFEST).write_text(text)
        return
    with create_file(partial / MANIFEST) as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    folder = checkpoint.path
    if folder.is_symlink() or folder.exists():  # the same step, saved again after a resume
        replaced = folder.with_name(f"{folder.name}.replaced{PARTIAL}")
        folder.rename(replaced)
        partial.rename(folder)
        with suppress(OSError):  # what is left of it is swept before the next save
            delete(replaced)
    else:
        partial.rename(folder)
    _sync_folder(folder.parent)


def _is_begun(folder: Path) -> bool:
    """Return whether a remote folder is what a save that was interrupted has left."""
    return is_remote(folder) and MANIFEST not in sizes(folder)


def _unmake(folder: Path) -> None:
    """Delete a remote checkpoint, which is none from the first moment on."""
    (folder / MANIFEST).unlink(missing_ok=True)
    delete(folder)


def _folders(run_dir: Path) -> list[Path]:
    """Return the folders that are named as checkpoints are.

    Raises:
        OSError: They can't be listed.
    """
    checkpoints = kept_by(run_dir) / CHECKPOINTS
    return [
        checkpoints / name for name in sorted(sizes(checkpoints)) if _step(checkpoints / name) >= 0
    ]


def _step(folder: Path) -> int:
    """Return the step of a folder's name; -1 where it has none."""
    number = folder.name.removeprefix(_NAME)
    is_one = folder.name.startswith(_NAME) and number.isdecimal()
    return int(number) if is_one and str(int(number)) == number else -1  # no step_007


def _order(name: str) -> tuple[bool, int, str]:
    """Put ranks' files by number, and the index, which a load has read by then, last."""
    return name in (manifest.INDEX, manifest.TORCH_INDEX), len(name), name


def _crc32(file: Path) -> int:
    """Return a file's CRC-32; -1 where it is gone, or its disk can't read it any more.

    Raises:
        OSError: It can't be read for reasons that say nothing of what is in it.
    """
    checksum = 0
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open_regular(file) as stream:
            while count := stream.readinto(buffer):
                checksum = crc32(buffer[:count], checksum)
    except (FileNotFoundError, NotRegularError):
        return -1
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return -1
    return checksum


def _can_lock(manifest: BinaryIO, kind: int) -> bool:
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
