"""A file that is written past the kernel's cache, and on disk once it is closed.

A checkpoint is read again after a failure or never: in the kernel's cache it would only take the
place of data that is read every epoch, and the time that it takes to fill it. Where a file system
has no such way, the same writes go through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.system.files import new_descriptor

_BUFFER = 16 << 20
_ALIGNED = 4096
"""What lengths and places of direct writes are multiples of; the kernel asks for 512 or this."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class DirectFile(io.RawIOBase):
    """A new file that takes bytes in order; the disk works while more are written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create it; what is there already, a link too, is an error.

        Raises:
            OSError: It can't be made.
        """
        self._file = _open_descriptor(path)
        # Memory that is mapped is aligned as pages are.
        self._buffers = [np.frombuffer(mmap.mmap(-1, _BUFFER), np.uint8) for _ in range(2)]
        self._filled = 0
        self._handed = 0
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._storing: Future[None] | None = None

    def writable(self) -> bool:
        """Say yes."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._handed + self._filled

    def write(self, data: Any) -> int:
        """Take bytes.

        Raises:
            OSError: Earlier ones could not be stored.
        """
        content = np.frombuffer(data, np.uint8)
        taken = 0
        while taken < len(content):
            part = content[taken : taken + _BUFFER - self._filled]
            # Of memory views the copy would hold Python's lock, for which a training step waits.
            np.copyto(self._buffers[0][self._filled : self._filled + len(part)], part)
            self._filled += len(part)
            taken += len(part)
            if self._filled == _BUFFER:
                self._hand_over()
        return len(content)

    def close(self) -> None:
        """Store what is left, and wait until the disk has it all.

        Raises:
            OSError: It could not be stored.
        """
        if self.closed:
            return
        try:
            self._await()
            _store(self._file, self._buffers[0], self._filled, self._handed)
            os.fsync(self._file)
        finally:
            self._disk.shutdown()
            os.close(self._file)
            super().close()

    def _hand_over(self) -> None:
        """Let the disk have the full buffer, and continue with the other."""
        self._await()
        full = self._buffers[0]
        self._storing = self._disk.submit(_store, self._file, full, self._filled, self._handed)
        self._buffers.reverse()
        self._handed += self._filled
        self._filled = 0

    def _await(self) -> None:
        if self._storing is not None:
            self._storing.result()


def _open_descriptor(path: str | os.PathLike[str]) -> int:
    file = new_descriptor(path)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(file)
            raise
    return file


def _store(file: int, buffer: npt.NDArray[np.uint8], size: int, place: int) -> None:
    """Write a buffer's first bytes at a place of a file; only its last ones may be unaligned."""
    whole = size - size % _ALIGNED
    view = buffer.data
    _write(file, view[:whole], place)
    if size > whole:
        _go_through_cache(file)
        _write(file, view[whole:size], place + whole)


def _write(file: int, view: memoryview, place: int) -> None:
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(file, view[done:], place + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _go_through_cache(file):
                raise


def _go_through_cache(file: int) -> bool:
    """Write directly no more; return whether that was so until now."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
