"""Writes a file with direct I/O, bypassing the page cache; the file is on disk once closed.

A checkpoint is read again only after a failure. In the page cache it would evict data that is read
every epoch, and filling the cache takes time. File systems without direct I/O get the same writes
through the cache.
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

from axonlaunch.system.storage.files import new_descriptor

_BUFFER = 16 << 20
_ALIGNED = 4096
"""Lengths and offsets of direct writes are multiples of this; the kernel requires 512 or 4096."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class DirectFile(io.RawIOBase):
    """New file that is written from start to end with direct I/O.

    There are two buffers: a thread writes one to the disk while the other one fills.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the file; an existing file or link is an error.

        Raises:
            OSError: The file exists or can't be created.
        """
        self._file = _open_descriptor(path)
        # Mapped memory is page-aligned.
        self._buffers = [np.frombuffer(mmap.mmap(-1, _BUFFER), np.uint8) for _ in range(2)]
        self._filled = 0
        self._submitted = 0
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._storing: Future[None] | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._submitted + self._filled

    def write(self, data: Any) -> int:
        """Write bytes.

        Raises:
            OSError: Earlier bytes could not be stored.
        """
        content = np.frombuffer(data, np.uint8)
        taken = 0
        while taken < len(content):
            part = content[taken : taken + _BUFFER - self._filled]
            # Copying with memoryviews would hold the GIL and stall the training step.
            np.copyto(self._buffers[0][self._filled : self._filled + len(part)], part)
            self._filled += len(part)
            taken += len(part)
            if self._filled == _BUFFER:
                self._hand_over()
        return len(content)

    def close(self) -> None:
        """Store the remaining bytes and wait until all are on disk.

        Raises:
            OSError: The bytes could not be stored.
        """
        if self.closed:
            return
        try:
            self._await()
            _store(self._file, self._buffers[0], self._filled, self._submitted)
            os.fsync(self._file)
        finally:
            self._disk.shutdown()
            os.close(self._file)
            super().close()

    def _hand_over(self) -> None:
        """Store the full buffer in the background and continue with the other one."""
        self._await()
        full = self._buffers[0]
        self._storing = self._disk.submit(_store, self._file, full, self._filled, self._submitted)
        self._buffers.reverse()
        self._submitted += self._filled
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


def _store(file: int, buffer: npt.NDArray[np.uint8], size: int, offset: int) -> None:
    """Write the first ``size`` bytes of a buffer; an unaligned tail goes through the cache."""
    aligned = size - size % _ALIGNED
    view = buffer.data
    _write(file, view[:aligned], offset)
    if size > aligned:
        _disable_direct_io(file)
        _write(file, view[aligned:size], offset + aligned)


def _write(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(file, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _disable_direct_io(file):
                raise


def _disable_direct_io(file: int) -> bool:
    """Switch a file to cached writes; return whether direct I/O was enabled before."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
