"""Folders of the token cache, written by one process and checked by checksums.

A folder gets its final name once it is complete. Its files are flushed to disk by then, and
``sums.json`` has the size and the CRC-32 of each. A folder or a file that is a link is an error.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axonlaunch.system.storage.files import create_file, open_regular, read_text, sync_folder

SUMS = "sums.json"
_LARGEST = 1 << 20
_BLOCK = 1 << 20
_NOT_READABLE = (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError)


@contextmanager
def writer_lock(partial: Path, *, waits: Callable[[], None]) -> Iterator[bool]:
    """Lock a folder, created if it is missing; yield whether it is still at its path.

    The kernel releases the lock when the process ends, for any reason.

    Args:
        waits: Called before waiting for another process.

    Raises:
        OSError: The folder can't be created or opened, or its path is a link.
    """
    refuse_link(partial)
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield _is_same(lock, partial)
    finally:
        os.close(lock)


def publish(partial: Path, complete: Path, *, sums: Mapping[str, int] | None = None) -> None:
    """Write the checksums of a folder's files, flush all of it to disk, and rename the folder.

    Args:
        partial: The folder, which this process has locked.
        complete: Final path of the folder.
        sums: CRC-32 of files that were computed while they were written; others are read again.

    Raises:
        OSError: A file can't be read or written.
    """
    computed = sums or {}
    about = {}
    for file in sorted(partial.iterdir()):
        if file.name != SUMS:
            with open_regular(file) as stream:
                size = os.fstat(stream.fileno()).st_size
                crc32 = (
                    computed[file.name] if file.name in computed else _crc32(stream.fileno(), size)
                )
                os.fsync(stream.fileno())
            about[file.name] = {"bytes": size, "crc32": crc32}
    (partial / SUMS).unlink(missing_ok=True)
    with create_file(partial / SUMS) as created:
        created.write(json.dumps(about).encode())
        created.flush()
        os.fsync(created.fileno())
    sync_folder(partial)
    partial.rename(complete)
    sync_folder(complete.parent)


def find_change(folder: Path, *, names: Collection[str] | None = None) -> str | None:
    """Return a description of the first change in a complete folder; None if it is unchanged.

    Args:
        names: Files to read and compare with their checksums; None: all. The sizes of all files
            are compared in any case.

    Raises:
        OSError: A file is a link or can't be read.
    """
    try:
        about: dict[str, Any] = json.loads(read_text(folder / SUMS, at_most=_LARGEST))
        for name, written in about.items():
            with open_regular(folder / name) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != written["bytes"]:
                    return f"{name} has {size:,} bytes, {written['bytes']:,} were written"
                is_read = names is None or name in names
                if is_read and _crc32(stream.fileno(), size) != written["crc32"]:
                    return f"{name} has another checksum than when it was written"
    except _NOT_READABLE as error:
        return f"a file is missing, or {SUMS} is invalid ({type(error).__name__})"
    return None


def has_sum(file: Path) -> bool:
    """Return whether a file of a complete folder has the checksum that it was written with.

    Raises:
        OSError: The file is a link or can't be read.
    """
    return find_change(file.parent, names=(file.name,)) is None


def matches(file: Path, *, size: int, crc32: int) -> bool:
    """Return whether a file begins with ``size`` bytes of a known CRC-32."""
    try:
        with open_regular(file) as stream:
            is_long_enough = os.fstat(stream.fileno()).st_size >= size
            return is_long_enough and _crc32(stream.fileno(), size) == crc32
    except FileNotFoundError:
        return not size


def discard(folder: Path) -> None:
    """Remove the checksums, so that the next process builds the folder again."""
    (folder / SUMS).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a folder to make room for a new one.

    Raises:
        OSError: The folder can't be deleted, or it is a link.
    """
    refuse_link(folder)
    if folder.exists():
        shutil.rmtree(folder)


def refuse_link(path: Path) -> None:
    """Raise an error for a link, so that this process does not write through it.

    Raises:
        OSError: The path is a link.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, f"{path} is a link, which is not followed for writing")


def _crc32(descriptor: int, size: int) -> int:
    total = 0
    for start in range(0, size, _BLOCK):
        total = zlib.crc32(os.pread(descriptor, min(_BLOCK, size - start), start), total)
    return total


def _is_same(descriptor: int, path: Path) -> bool:
    """Return whether a path still leads to the opened file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
