"""The lines of a file that a run adds to: what was read before is not read again.

A file that was written again, as a run that resumes writes its metrics, is read from its beginning.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from axonlaunch.system.files import open_regular
from axonlaunch.system.strict_json import parse_json

LARGEST_READ = 1 << 30
"""Bytes of a file that are read: metrics of 100,000 steps are 30 MB."""
_TAIL = 256


class GrowingLines:
    """The JSON objects of a file, a line each.

    Attributes:
        lines: Those that were read so far.
        unreadable: How many lines are none.
        is_cut: Whether the file is larger than what is read of it.
    """

    def __init__(self, file: Path) -> None:
        """Remember the file, of this node or of a remote place; it need not be there yet."""
        self._file = file
        self._inode: tuple[int, int] | None = None
        self._offset, self._tail = 0, b""
        self.lines: list[dict[str, Any]] = []
        self.unreadable, self.is_cut = 0, False

    def read(self) -> None:
        """Read what is new; half a line at the end is being written, and is left for later.

        Raises:
            OSError: It can't be read. One that is not there has no lines.
        """
        try:
            with open_regular(self._file) as stream:
                if not self._continues(stream):
                    self._forget()
                    stream.seek(0)
                    self._inode = _inode(stream)
                content = stream.read(max(0, LARGEST_READ - self._offset) + 1)
        except (FileNotFoundError, NotADirectoryError):
            self._forget()
            return
        self.is_cut = self._offset + len(content) > LARGEST_READ
        whole, newline, _ = content.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        self._tail = (self._tail + whole + newline)[-_TAIL:]
        for text in whole.split(b"\n") if newline else ():
            try:
                line = parse_json(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                self.lines.append(line)
            else:
                self.unreadable += 1

    def _continues(self, stream: io.BufferedReader) -> bool:
        """Whether the file begins with what was read; leaves the stream behind that."""
        if self._inode is None or self._inode != _inode(stream):
            return False
        stream.seek(self._offset - len(self._tail))
        return stream.read(len(self._tail)) == self._tail

    def _forget(self) -> None:
        self._inode, self._offset, self._tail = None, 0, b""
        self.lines, self.unreadable, self.is_cut = [], 0, False


def _inode(stream: io.BufferedReader) -> tuple[int, int] | None:
    """Return which file of this node it is; None of a remote place, where each is read whole."""
    try:
        status = os.fstat(stream.fileno())
    except (AttributeError, io.UnsupportedOperation, OSError):
        return None
    return status.st_dev, status.st_ino
