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
from pathlib import Path
from typing import Any, BinaryIO, cast

_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""What opening a link, a socket or a folder fails with."""


LOCKS = Path("/proc/locks")
"""Where the kernel lists the locks of this node."""
_BLOB = r"\.\./\.\./blobs/([0-9a-f]{40,64})"


class NotRegularError(OSError):
    """A path that should be a regular file leads elsewhere, or to something else."""


class TooLargeError(OSError):
    """A file is larger than any of its kind."""


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


def hub_blob(file: Path) -> Path:
    """Return the file that a snapshot in Hugging Face's cache links to; others as they are.

    All files of a snapshot are links to ``../../blobs/<digest>``. They stay in the folder of their
    repository, so that they lead nowhere that whoever made the folder could not have put a file.
    """
    if file.is_symlink() and (blob := re.fullmatch(_BLOB, str(file.readlink()))):
        return file.parent.parent.parent / "blobs" / blob[1]
    return file


def create_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that is not there yet, to write it.

    Raises:
        FileExistsError: Something is there, be it a link that leads nowhere.
        OSError: It can't be made.
    """
    return os.fdopen(new_descriptor(path), "wb")


def new_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of what ``create_file`` opens."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def appending_descriptor(path: str | os.PathLike[str], *, creates: bool = True) -> int:
    """Return a descriptor that adds to a regular file.

    Args:
        path: The file.
        creates: Whether a missing file is created, or an error.

    Raises:
        NotRegularError: It is something else.
        OSError: It can't be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _regular(path, flags | (os.O_CREAT if creates else 0))


def append_text(path: str | os.PathLike[str], text: str, *, creates: bool = True) -> None:
    """Add to a regular file, as ``appending_descriptor`` does."""
    with os.fdopen(appending_descriptor(path, creates=creates), "a") as stream:
        stream.write(text)


def replace_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 as ``replace`` does."""
    replace(path, text.encode())


def replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it.

    A link in its place is replaced, not followed.

    Raises:
        OSError: It can't be written; nothing is left of it.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # of a process that was killed, or somebody's link
    try:
        with create_file(partial) as stream:
            stream.write(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


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
