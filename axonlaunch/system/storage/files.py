"""Opens and writes files in folders that may have been prepared by other users.

Links, FIFOs, sockets, devices and files that are too large are errors.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Error numbers of opening a link, a socket or a folder."""
LOCKS = Path("/proc/locks")
"""File in which the kernel lists the locks of this node."""
_BLOB = r"blobs/([0-9a-f]{40,64})"
LARGEST_MODEL_FILE = 256 << 20
"""Maximum bytes of a file in a model folder other than weights, such as ``tokenizer.json``."""
LARGEST_WEIGHTS_FILE = 5 * 10**9
"""Default maximum bytes of a file of exported weights."""


class NotRegularError(OSError):
    """A path that should be a regular file is a link or a special file."""


class TooLargeError(OSError):
    """A file is larger than the limit for its kind."""


@dataclass(frozen=True)
class FileCopy:
    """Content and permissions of a small file.

    Attributes:
        content: Complete content.
        mode: Read and write permissions for a copy; the owner can always read and write it.
    """

    content: bytes
    mode: int


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file or a remote file for reading.

    The check uses the opened descriptor, so the file can't be exchanged between check and use.
    Opening does not wait for a FIFO without a writer.

    Raises:
        NotRegularError: The path is a link, a FIFO, a socket, a folder or a device.
        OSError: The file can't be opened.
    """
    if not isinstance(path, str | Path):  # a path of ``upath``: remote storage has only files
        remote: io.BufferedReader = cast("Any", path).open("rb")
        return remote
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(_regular(path, flags), "rb")


def why_no_folder(path: Path) -> str:
    """Return the reason why a path is not a folder."""
    return "is a file, not a folder" if path.exists() else "there is no such folder"


def read_text(path: str | os.PathLike[str], *, at_most: int) -> str:
    """Read a regular file or a remote file in UTF-8.

    Args:
        path: Path of the file.
        at_most: Maximum size in bytes.

    Raises:
        NotRegularError: The path is not a regular file.
        TooLargeError: The file is larger than ``at_most``.
        OSError: The file can't be read.
        UnicodeDecodeError: The content is not UTF-8; this is a ``ValueError``.
    """
    with open_regular(path) as stream:
        content = stream.read(at_most + 1)
    if len(content) > at_most:
        message = f"is larger than {at_most} bytes"
        raise TooLargeError(errno.EFBIG, message, str(path))
    return content.decode()


def read_copy(path: str | os.PathLike[str], *, at_most: int) -> FileCopy:
    """Read a local regular file with its permissions, to write a copy.

    Args:
        path: Path of the file.
        at_most: Maximum size in bytes; a larger file is not read.

    Raises:
        NotRegularError: The path is a link, a FIFO, a socket, a folder or a device.
        TooLargeError: The file is larger than ``at_most``.
        OSError: The file can't be read.
    """
    with open_regular(path) as stream:
        status = os.fstat(stream.fileno())
        content = stream.read(at_most + 1) if status.st_size <= at_most else b""
    if max(status.st_size, len(content)) > at_most:
        raise TooLargeError(errno.EFBIG, f"is larger than {at_most} bytes", str(path))
    return FileCopy(content, status.st_mode & 0o666 | 0o600)


def why_not_read(file: Path, error: OSError) -> str:
    """Return why a file in a foreign folder was not read; for a link, also what to do."""
    if isinstance(error, NotRegularError) and file.is_symlink():
        return f"{error.strerror} but a link out of its folder; replace it with a copy of the file"
    return str(error.strerror or error)


def inside_folder(file: Path, *, depth: int = 0) -> Path:
    """Return the target of a link to a file in the same folder or to a blob of the Hub's cache.

    All other paths are returned unchanged, so that ``open_regular`` refuses links out of a folder.

    Args:
        file: File in a folder that may have been prepared by another user.
        depth: Number of folders between the model's folder and the file.
    """
    if not file.is_symlink():
        return file
    target = str(file.readlink())
    in_same_folder = "/" not in target and target not in ("", ".", "..")
    return file.with_name(target) if in_same_folder else hub_blob(file, depth=depth)


def hub_blob(file: Path, *, depth: int = 0) -> Path:
    """Return the target of a link in a snapshot of Hugging Face's cache; other paths unchanged.

    All files of a snapshot are links to ``../../blobs/<digest>`` in the folder of their repository.
    Following them is no risk, because the creator of that folder could have put the same content
    into the snapshot.

    Args:
        file: File of a snapshot.
        depth: Number of folders between the snapshot and the file.
    """
    above = "../" * (2 + depth)
    if file.is_symlink() and (blob := re.fullmatch(re.escape(above) + _BLOB, str(file.readlink()))):
        blobs = file.parents[2 + depth] / "blobs"
        return file if blobs.is_symlink() else blobs / blob[1]
    return file


def create_file(path: str | os.PathLike[str], *, mode: int = 0o666) -> BinaryIO:
    """Create a new file for writing.

    Args:
        path: Path of the file.
        mode: Permissions, which the process's umask reduces.

    Raises:
        FileExistsError: The path exists, even as a dangling link.
        OSError: The file can't be created.
    """
    return os.fdopen(new_descriptor(path, mode=mode), "wb")


def new_descriptor(path: str | os.PathLike[str], *, mode: int = 0o666) -> int:
    """Create a new file as ``create_file`` does, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


def appending_descriptor(path: str | os.PathLike[str], *, creates: bool = True) -> int:
    """Return a descriptor that appends to a regular file.

    Args:
        path: Path of the file.
        creates: Whether a missing file is created; otherwise it is an error.

    Raises:
        NotRegularError: The path is not a regular file.
        OSError: The file can't be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _regular(path, flags | (os.O_CREAT if creates else 0))


def append_text(path: str | os.PathLike[str], text: str, *, creates: bool = True) -> None:
    """Append text to a regular file; see ``appending_descriptor``."""
    with os.fdopen(appending_descriptor(path, creates=creates), "a") as stream:
        stream.write(text)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 atomically; see ``replace``."""
    replace(path, text.encode())


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON object atomically; see ``replace``."""
    replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def replace(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: a reader sees either the old or the new content.

    An existing link is replaced, not followed.

    Args:
        path: Path of the file.
        content: Complete content.
        mode: Permissions, which the process's umask reduces.

    Raises:
        OSError: The file can't be written. No partial file is left.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # left by a killed process, or a link of another user
    try:
        with create_file(partial, mode=mode) as stream:
            stream.write(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_copy(path: os.PathLike[str], copy: FileCopy) -> None:
    """Write a copy of a file with at most the permissions of the original.

    Remote files have no permissions.

    Args:
        path: Path of the copy, local or remote.
        copy: Content and permissions of the original.

    Raises:
        OSError: The file can't be written, or its folder is a link.
    """
    if not isinstance(path, Path):
        cast("Any", path).write_bytes(copy.content)
        return
    if path.parent.is_symlink():
        raise NotRegularError(errno.EINVAL, "is a link to a folder", str(path.parent))
    replace(path, copy.content, mode=copy.mode)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def modified_at(path: Path) -> float:
    """Return the modification time of a file in seconds since 1970; 0 if unknown."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def is_there(path: Path) -> bool:
    """Return whether a path exists; unlike ``Path.exists`` this does not hide other errors.

    Raises:
        OSError: The path can't be checked.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder. The kernel releases the lock however the process ends.

    Raises:
        BlockingIOError: Another process has locked the folder.
        OSError: The folder can't be opened, or the path is not a folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lock a file, which is created if necessary. The lock ends with the process.

    Raises:
        BlockingIOError: Another process has locked the file.
        OSError: The file can't be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process of this node has locked a folder, from the kernel's list of locks.

    Trying to take the lock could make another process fail that takes it at the same moment.
    """
    try:
        inode = f"{_device(folder)}:{folder.stat().st_ino}"
        with LOCKS.open(encoding="ascii") as stream:
            return any(line.split()[5] == inode for line in stream)
    except (OSError, AttributeError, IndexError, TypeError, ValueError):
        return False


def _device(folder: Path) -> str:
    """Return the device of a folder's disk as in the list of locks: ``08:01``, in hexadecimal.

    For a btrfs subvolume ``stat`` reports another device than the list of locks, which has that of
    the mount.

    Raises:
        OSError: The device can't be determined.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        description = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    finally:
        os.close(descriptor)
    [mount] = re.findall(r"^mnt_id:\s*(\d+)$", description, re.MULTILINE)
    mounts = Path("/proc/self/mountinfo").read_text()
    [device] = re.findall(rf"^{mount} \d+ (\d+:\d+) ", mounts, re.MULTILINE)
    major, _, minor = device.partition(":")
    return f"{int(major):02x}:{int(minor):02x}"


def _regular(path: str | os.PathLike[str], flags: int) -> int:
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    os.set_blocking(descriptor, True)
    return descriptor


def _not_regular(path: str | os.PathLike[str]) -> NotRegularError:
    return NotRegularError(errno.EINVAL, "is not a regular file", os.fspath(path))
