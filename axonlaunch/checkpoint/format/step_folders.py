"""Finds, verifies, completes and deletes the folders ``checkpoints/step_<K>`` of a run.

A local folder of that name is complete: it is written under another name, synced to disk, and
renamed last. Remote storage can't rename a folder, so there a checkpoint is complete once it has a
manifest, which is written last and deleted first. Nothing here imports torch or parses tensors.
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

from axonlaunch.checkpoint.format import manifest
from axonlaunch.checkpoint.format.manifest import MANIFEST, Checkpoint, CorruptCheckpointError, Sum
from axonlaunch.checkpoint.format.storage import (
    CHECKPOINTS,
    checkpoints_parent,
    delete,
    is_remote,
    sizes,
)
from axonlaunch.system.storage.disk import free_bytes
from axonlaunch.system.storage.files import (
    NotRegularError,
    TooLargeError,
    create_file,
    open_regular,
    sync_folder,
)
from axonlaunch.system.text.formatting import MIB

PARTIAL = ".partial"
_NAME = "step_"
_CHUNK = 1 << 22

CHANGED = "is not what was written (its CRC-32 differs)"
"""Message about a file that ``damage`` returns."""


@dataclass(frozen=True)
class Retention:
    """Rule for keeping checkpoints.

    Attributes:
        newest: Number of newest checkpoints to keep.
        every: Keep checkpoints whose step is a multiple of this; 0 disables the rule.
        steps: Keep the checkpoints of these steps.
        best: Number of checkpoints with the best evaluations to keep.
        metric: Name of the metric by which evaluations are compared; loss: the evaluation loss.
        higher_is_better: Whether a higher value of the metric is better.
    """

    newest: int
    every: int = 0
    steps: tuple[int, ...] = ()
    best: int = 0
    metric: str = "loss"
    higher_is_better: bool = False

    def badness(self, checkpoint: Checkpoint) -> float | None:
        """Return a number that is lower the better a checkpoint is; None without an evaluation."""
        value = checkpoint.eval_loss
        if self.metric != "loss":
            value = checkpoint.metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.higher_is_better else value


def path_of(run_dir: Path, *, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return run_dir / CHECKPOINTS / f"{_NAME}{step}"


def partial_of(folder: Path) -> Path:
    """Return the folder name used while a checkpoint is written or deleted."""
    return folder if is_remote(folder) else folder.with_name(folder.name + PARTIAL)


def prepare(folder: Path) -> None:
    """Remove leftovers and check for free space before a checkpoint is written.

    Raises:
        OSError: The disk has less free space than the previous checkpoint takes.
    """
    run_dir = folder.parent.parent
    sweep_partial(run_dir)
    if is_remote(folder):
        if sizes(folder):  # the same step, saved again after a resume
            _delete_remote(folder)
        return
    previous = latest(run_dir)
    if previous is not None:  # preflight checks the space for the first checkpoint
        needed = sum(file.bytes for file in files(previous).values())
        _, free = free_bytes(run_dir)
        if needed > free:
            message = f"it takes {needed / MIB:,.0f} MiB, and the disk has {free / MIB:,.0f} MiB"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {message}")


def latest(run_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run; None without a checkpoint."""
    checkpoints = list_checkpoints(run_dir)
    return checkpoints[-1] if checkpoints else None


def find_checkpoint(path: Path, *, step: int | None = None) -> Checkpoint | None:
    """Return the checkpoint at a path, or the newest one or the given step of a run.

    Returns None if there is no such checkpoint. The path itself may be a link; links inside a run's
    folder are not followed.

    Raises:
        OSError: The path can't be listed or read.
    """
    path = follow_link(path)
    if MANIFEST in sizes(path):
        return read_checkpoint(path)
    return (
        latest(path)
        if step is None
        else read_checkpoint(path_of(checkpoints_parent(path), step=step))
    )


def follow_link(path: Path) -> Path:
    """Return the target of a path that the user gave, if it is a link; other paths unchanged.

    Links inside of a folder are not followed.
    """
    return path.resolve() if not is_remote(path) and path.is_symlink() else path


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return a run's complete checkpoints, by step.

    Raises:
        OSError: The checkpoints can't be listed or read.
    """
    checkpoints = [read_checkpoint(folder) for folder in _folders(run_dir)]
    return sorted((c for c in checkpoints if c is not None), key=lambda c: c.step)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder; None if it is not complete or not valid.

    Raises:
        OSError: The folder can't be read.
    """
    result = _checkpoint_or_fault(folder)
    return result if isinstance(result, Checkpoint) else None


def fault(folder: Path) -> str | None:
    """Return the fault of a checkpoint's folder in words; None if it is complete.

    Only names and sizes are checked; ``damage`` reads the contents.

    Raises:
        OSError: The folder can't be read.
    """
    result = _checkpoint_or_fault(folder)
    return result if isinstance(result, str) else None


def _checkpoint_or_fault(folder: Path) -> Checkpoint | str:
    """Return a complete checkpoint, or the fault of the folder in words.

    Raises:
        OSError: The folder can't be read for a reason other than damage.
    """
    if not is_remote(folder) and folder.is_symlink():
        return "is a link"
    present = sizes(folder)
    if MANIFEST not in present:
        return f"lacks {MANIFEST}"
    try:
        described = manifest.read_manifest(folder)
    except FileNotFoundError:  # deleted since it was listed
        return f"lacks {MANIFEST}"
    except NotRegularError:
        return f"has {MANIFEST}, which is not a regular file"
    except TooLargeError:
        return f"has a {MANIFEST} that is too large"
    except CorruptCheckpointError as error:
        return str(error)
    if _step(folder) not in (-1, described.checkpoint.step):
        return f"has a {MANIFEST} of step {described.checkpoint.step}"
    for name, expected in described.files.items():
        if name not in present:
            return f"lacks {name}"
        size = present[name]
        if size is None:
            return f"has {name}, which is not a regular file"
        if size != expected.bytes:
            return f"has {size} bytes of {name} instead of {expected.bytes}"
    return described.checkpoint


def corrupt_checkpoints(path: Path, *, after: Checkpoint | None = None) -> dict[Path, str]:
    """Return the invalid checkpoint folders of a run with their faults, by step.

    Args:
        path: Folder of a run, or of a checkpoint.
        after: Checkpoint whose predecessors are ignored, and the checkpoint itself.
    """
    first_step = -1 if after is None else after.step
    path = follow_link(path)
    is_checkpoint = path.name.startswith(_NAME) and CHECKPOINTS not in sizes(path)
    folders = [path] if is_checkpoint else sorted(_folders(path), key=_step)
    folders = [
        folder
        for folder in folders
        if _step(folder) > first_step and (is_checkpoint or not _is_interrupted(folder))
    ]
    return {folder: reason for folder in folders if (reason := fault(folder))}


def damage(checkpoint: Checkpoint, *, part: int = 0, parts: int = 1) -> list[str]:
    """Read the files of a checkpoint and return the names of those with a wrong checksum.

    Args:
        checkpoint: Checkpoint to verify.
        part: Number of the share of files to read.
        parts: Number of shares, usually one per rank. With as many ranks as wrote the checkpoint,
            each rank reads the file of one rank.
    """
    expected = sorted(files(checkpoint).items(), key=lambda item: _order(item[0]))
    share = expected[part::parts]
    return [name for name, entry in share if _crc32(checkpoint.path / name) != entry.crc32]


def files(checkpoint: Checkpoint) -> dict[str, Sum]:
    """Return the size and checksum of each file of a checkpoint."""
    return manifest.read_manifest(checkpoint.path).files


def prune(run_dir: Path, retention: Retention) -> dict[Path, OSError]:
    """Delete the checkpoints that are not kept, except those that are being read.

    Returns:
        Checkpoints that could not be deleted, with the errors.

    Raises:
        OSError: The checkpoints can't be listed or read.
    """
    left: dict[Path, OSError] = {}
    for checkpoint in list_unkept(list_checkpoints(run_dir), retention):
        try:
            _delete_unless_read(checkpoint.path)
        except FileNotFoundError:
            continue  # another process has deleted it
        except OSError as error:
            left[checkpoint.path] = error
    return left


def _delete_unless_read(folder: Path) -> None:
    """Delete a checkpoint unless another process holds its read lock."""
    if is_remote(folder):
        _delete_remote(folder)
        return
    with open_regular(folder / MANIFEST) as stream:
        if not _can_lock(stream, fcntl.LOCK_EX):
            return
        # Renamed first, so that a folder named like a checkpoint is never half deleted.
        doomed = partial_of(folder)
        folder.rename(doomed)
    delete(doomed)


def list_unkept(checkpoints: Sequence[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Return the checkpoints that a retention rule does not keep.

    Args:
        checkpoints: All checkpoints of the run, in order of their steps.
    """
    evaluated = [
        (badness, -c.step, c) for c in checkpoints if (badness := retention.badness(c)) is not None
    ]
    best = [c for *_, c in sorted(evaluated, key=lambda entry: entry[:2])[: retention.best]]
    return [
        c
        for c in checkpoints[: -retention.newest]
        if c not in best
        and c.step not in retention.steps
        and not (retention.every and c.step % retention.every == 0)
    ]


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Lock a checkpoint against deletion by its run; remote checkpoints have no lock.

    Raises:
        CorruptCheckpointError: The checkpoint was deleted.
    """
    try:
        with open_regular(checkpoint.path / MANIFEST) as stream:
            if not is_remote(checkpoint.path):
                _can_lock(stream, fcntl.LOCK_SH)
            yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{error.filename}: it is gone") from None


def sweep_partial(run_dir: Path) -> list[str]:
    """Delete the leftovers of interrupted saves; return the names of the deleted folders."""
    if is_remote(run_dir):
        left = [folder for folder in _folders(run_dir) if _is_interrupted(folder)]
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
    """Write the manifest and give the folder its final name.

    A reader finds either no checkpoint or a complete one, because the manifest is written last and
    the folder is renamed atomically.

    Args:
        partial: Folder with the written and synced files.
        checkpoint: Checkpoint to complete; an existing one of the same step is replaced.
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
    sync_folder(partial)
    folder = checkpoint.path
    if folder.is_symlink() or folder.exists():  # the same step, saved again after a resume
        replaced = folder.with_name(f"{folder.name}.replaced{PARTIAL}")
        folder.rename(replaced)
        partial.rename(folder)
        with suppress(OSError):  # leftovers are removed before the next save
            delete(replaced)
    else:
        partial.rename(folder)
    sync_folder(folder.parent)


def _is_interrupted(folder: Path) -> bool:
    """Return whether a remote folder is the leftover of an interrupted save."""
    return is_remote(folder) and MANIFEST not in sizes(folder)


def _delete_remote(folder: Path) -> None:
    """Delete a remote checkpoint, manifest first, so that it stops being one at once."""
    (folder / MANIFEST).unlink(missing_ok=True)
    delete(folder)


def _folders(run_dir: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint.

    Raises:
        OSError: The run folder can't be listed.
    """
    checkpoints = checkpoints_parent(run_dir) / CHECKPOINTS
    return [
        checkpoints / name for name in sorted(sizes(checkpoints)) if _step(checkpoints / name) >= 0
    ]


def _step(folder: Path) -> int:
    """Return the step in a folder's name; -1 if it is not the name of a checkpoint."""
    number = folder.name.removeprefix(_NAME)
    has_number = folder.name.startswith(_NAME) and number.isdecimal()
    return int(number) if has_number and str(int(number)) == number else -1  # no step_007


def _order(name: str) -> tuple[bool, int, str]:
    """Return the sort key of a file: files of ranks by number, then the indices.

    Indices are last because they are already in the page cache.
    """
    return name in (manifest.INDEX, manifest.TORCH_INDEX), len(name), name


def _crc32(file: Path) -> int:
    """Return the CRC-32 of a file; -1 if it is gone or its disk returns an I/O error.

    Raises:
        OSError: The file can't be read for a reason other than damage.
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
    """Try to lock an open manifest; return True as well if the file system has no locks."""
    try:
        fcntl.flock(manifest, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
