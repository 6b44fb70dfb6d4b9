"""Opens and writes files in folders that others may have prepared.

Links, FIFOs, sockets and devices are refused, whoever put them there, and so is what is too large.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""What opening a link, a socket or a folder fails with."""


LOCKS = Path("/proc/locks")
"""Where the kernel lists the locks of this node."""
_BLOB = r"blobs/([0-9a-f]{40,64})"


LARGEST_MODEL_FILE = 256 << 20
"""Bytes of a file of a model's folder other than weights, such as ``tokenizer.json``."""


class NotRegularError(OSError):
    """A path that should be a regular file leads elsewhere, or to something else."""


class TooLargeError(OSError):
    """A file is larger than any of its kind."""


@dataclass(frozen=True)
class FileCopy:
    """Content and permissions of a small file.

    Attributes:
        content: All of it.
        mode: Read and write permissions for a copy, which its owner may always read and write.
    """

    content: bytes
    mode: int


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file, or one of a remote place, to read it.

    What is looked at is what was opened, so that nobody can swap it in between; and a FIFO that
    nobody writes to is not waited for.

    Raises:
        NotRegularError: It is a link, a FIFO, a socket, a folder or a device.
        OSError: It can't be opened.
    """
    if not isinstance(path, str | Path):  # ``upath``'s, of a place that knows files alone
        remote: io.BufferedReader = cast("Any", path).open("rb")
        return remote
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(_regular(path, flags), "rb")


def why_no_folder(path: Path) -> str:
    """Say what is at a path where a folder is wanted and there is none."""
    return "is a file, not a folder" if path.exists() else "there is no such folder"


def read_text(path: str | os.PathLike[str], *, at_most: int) -> str:
    """Read a regular file of UTF-8, or one of a remote place.

    Args:
        path: The file.
        at_most: Bytes.

    Raises:
        NotRegularError: It is something else.
        TooLargeError: It is larger.
        OSError: It can't be read.
        UnicodeDecodeError: It is not UTF-8; a ``ValueError``.
    """
    with open_regular(path) as stream:
        content = stream.read(at_most + 1)
    if len(content) > at_most:
        message = f"is larger than {at_most} bytes"
        raise TooLargeError(errno.EFBIG, message, str(path))
    return content.decode()


def read_copy(path: str | os.PathLike[str], *, at_most: int) -> FileCopy:
    """Read a local regular file, with its permissions, to write it elsewhere.

    Args:
        path: The file.
        at_most: Largest size in bytes; a larger file is not read.

    Raises:
        NotRegularError: It is a link, a FIFO, a socket, a folder or a device.
        TooLargeError: It is larger.
        OSError: It can't be read.
    """
    with open_regular(path) as stream:
        status = os.fstat(stream.fileno())
        content = stream.read(at_most + 1) if status.st_size <= at_most else b""
    if max(status.st_size, len(content)) > at_most:
        raise TooLargeError(errno.EFBIG, f"is larger than {at_most} bytes", str(path))
    return FileCopy(content, status.st_mode & 0o666 | 0o600)


def why_not_read(file: Path, error: OSError) -> str:
    """Say why a file of a foreign folder was not read, and how to replace a link."""
    if isinstance(error, NotRegularError) and file.is_symlink():
        return f"{error.strerror} but a link out of its folder; put a copy of the file in its place"
    return str(error.strerror or error)


def inside_folder(file: Path, *, depth: int = 0) -> Path:
    """Return the target of a link to a file of the same folder or to a blob of the Hub's cache.

    All other paths are returned unchanged, so that ``open_regular`` refuses links out of a folder.

    Args:
        file: File of a folder that others may have prepared.
        depth: Folders between the model's folder and the file.
    """
    if not file.is_symlink():
        return file
    target = str(file.readlink())
    is_beside = "/" not in target and target not in ("", ".", "..")
    return file.with_name(target) if is_beside else hub_blob(file, depth=depth)


def hub_blob(file: Path, *, depth: int = 0) -> Path:
    """Return the file that a snapshot in Hugging Face's cache links to; others unchanged.

    All files of a snapshot are links to ``../../blobs/<digest>``, in the folder of their
    repository. Whoever made that folder could have put the same content there.

    Args:
        file: File of a snapshot.
        depth: Folders between the snapshot and the file.
    """
    above = "../" * (2 + depth)
    if file.is_symlink() and (blob := re.fullmatch(re.escape(above) + _BLOB, str(file.readlink()))):
        blobs = file.parents[2 + depth] / "blobs"
        return file if blobs.is_symlink() else blobs / blob[1]
    return file


def create_file(path: str | os.PathLike[str], *, mode: int = 0o666) -> BinaryIO:
    """Open a file that is not there yet, to write it.

    Args:
        path: The file.
        mode: Permissions, which the process's umask reduces.

    Raises:
        FileExistsError: Something is there, be it a link that leads nowhere.
        OSError: It can't be made.
    """
    return os.fdopen(new_descriptor(path, mode=mode), "wb")


def new_descriptor(path: str | os.PathLike[str], *, mode: int = 0o666) -> int:
    """Return a descriptor of what ``create_file`` opens."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


def appending_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a descriptor that adds to a regular file, which is made where there is none.

    Raises:
        NotRegularError: It is something else.
        OSError: It can't be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _regular(path, flags)


def append_text(path: str | os.PathLike[str], text: str) -> None:
    """Add to a regular file, as ``appending_descriptor`` does."""
    with os.fdopen(appending_descriptor(path), "a") as stream:
        stream.write(text)


def replace_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 as ``replace`` does."""
    replace(path, text.encode())


def replace(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it.

    A link in its place is replaced, not followed.

    Args:
        path: The file.
        content: All of it.
        mode: Permissions, which the process's umask reduces.

    Raises:
        OSError: It can't be written; nothing is left of it.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # of a process that was killed, or somebody's link
    try:
        with create_file(partial, mode=mode) as stream:
            stream.write(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_copy(path: os.PathLike[str], copy: FileCopy) -> None:
    """Write a file with at most the permissions of the one that it is a copy of.

    A remote place has no permissions.

    Args:
        path: The file, local or remote.
        copy: What to write.

    Raises:
        OSError: It can't be written, or its folder is a link.
    """
    if not isinstance(path, Path):
        cast("Any", path).write_bytes(copy.content)
        return
    if path.parent.is_symlink():
        raise NotRegularError(errno.EINVAL, "is a link to a folder", str(path.parent))
    replace(path, copy.content, mode=copy.mode)


def modified_at(path: Path) -> float:
    """Return when a file was last written, in seconds since 1970; 0 if that can't be found out."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def is_there(path: Path) -> bool:
    """Whether a path exists; unlike ``Path.exists`` it passes over no error but that.

    Raises:
        OSError: That can't be found out.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder, which the kernel lets go of however the process ends.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It can't be opened, or is no folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process of this node has locked a folder, which is asked without touching it.

    Trying the lock would refuse who takes it just then.
    """
    try:
        place = f"{_device(folder)}:{folder.stat().st_ino}"
        with LOCKS.open(encoding="ascii") as stream:
            return any(line.split()[5] == place for line in stream)
    except (OSError, AttributeError, IndexError, TypeError, ValueError):
        return False


def _device(folder: Path) -> str:
    """Return the device of a folder's disk, as the kernel lists locks: ``08:01``, in hexadecimal.

    ``stat`` has another for a part of a btrfs; that of its mount is the same.

    Raises:
        OSError: It can't be found out.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        about = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    finally:
        os.close(descriptor)
    [mount] = re.findall(r"^mnt_id:\s*(\d+)$", about, re.MULTILINE)
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
