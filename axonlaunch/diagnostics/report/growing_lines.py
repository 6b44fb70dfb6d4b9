"""Reads the JSON lines that are appended to a file, without reading earlier lines again.

If the file was replaced, as the metrics of a resumed run are, it is read from the beginning.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from axonlaunch.system.storage.files import open_regular
from axonlaunch.system.storage.strict_json import parse_json

LARGEST_READ = 1 << 30
"""Maximum number of bytes that are read; metrics of 100,000 steps take 30 MB."""
_TAIL = 256


class GrowingLines:
    """The JSON objects in the lines of a growing file.

    Attributes:
        lines: Objects read so far.
        unreadable: Number of lines that are not JSON objects.
        is_cut: Whether the file is longer than ``LARGEST_READ``, so that its end is not read.
    """

    def __init__(self, file: Path) -> None:
        """Remember the file, which may be local or remote (``upath``) and need not exist yet."""
        self._file = file
        self._inode: tuple[int, int] | None = None
        self._offset, self._tail = 0, b""
        self.lines: list[dict[str, Any]] = []
        self.unreadable, self.is_cut = 0, False

    def read(self) -> None:
        """Read new lines. An incomplete last line is left for the next call.

        Raises:
            OSError: The file can't be read. A missing file has no lines.
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
        complete, newline, _ = content.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        self._tail = (self._tail + complete + newline)[-_TAIL:]
        for text in complete.split(b"\n") if newline else ():
            try:
                line = parse_json(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                self.lines.append(line)
            else:
                self.unreadable += 1

    def _continues(self, stream: io.BufferedReader) -> bool:
        """Return whether the lines read so far are unchanged; move the stream to their end."""
        if self._inode is None or self._inode != _inode(stream):
            return False
        stream.seek(self._offset - len(self._tail))
        return stream.read(len(self._tail)) == self._tail

    def _forget(self) -> None:
        self._inode, self._offset, self._tail = None, 0, b""
        self.lines, self.unreadable, self.is_cut = [], 0, False


def _inode(stream: io.BufferedReader) -> tuple[int, int] | None:
    """Return the identity of a local file; None for a remote file, which is always read in full."""
    try:
        status = os.fstat(stream.fileno())
    except (AttributeError, io.UnsupportedOperation, OSError):
        return None
    return status.st_dev, status.st_ino
