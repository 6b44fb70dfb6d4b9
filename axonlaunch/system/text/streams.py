"""Standard output and error of a process that may outlive the reader of its output.

Writing never raises an exception. Output that can't be written is dropped, because a closed console
must not end a run.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast

_PASSING = (errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
"""Errors that may be temporary: a full pipe or disk. After EPIPE or EIO, when the reader has ended
or the terminal is closed, output is not possible any more."""


def open_missing() -> None:
    """Open /dev/null for standard descriptors that the parent process closed (``>&-``).

    This must be called before any other file is opened. Otherwise that file could get the number of
    standard output and receive printed text.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            silence(descriptor)
    # Python sets closed streams to None.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", buffering=1, closefd=False)


def escape_unencodable() -> None:
    """Print characters that standard output can't encode as escapes, instead of raising an error.

    These are names of files that are not UTF-8, and letters like é where the locale is not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(errors="backslashreplace")


def silence(*descriptors: int) -> None:
    """Redirect descriptors to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        if descriptor == null:  # the descriptor was closed, so os.open reused its number
            os.set_inheritable(null, True)
        else:
            os.dup2(null, descriptor)
    if null not in descriptors:
        os.close(null)


def tolerant(stream: TextIO) -> TextIO:
    """Return a wrapper of a stream that never raises when writing."""
    return cast("TextIO", stream if isinstance(stream, _Tolerant) else _Tolerant(stream))


def refusal(stream: TextIO) -> str | None:
    """Return the first error for which a tolerant stream dropped text; None if it dropped none."""
    return stream.refused if isinstance(stream, _Tolerant) else None


class _Tolerant:
    """Passes text to a stream and ignores errors.

    Attributes:
        refused: Text of the first error; None without errors.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.refused: str | None = None
        if hasattr(stream, "reconfigure"):
            # Characters that the terminal can't encode must not raise either.
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write text; drop it on error."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush written text; drop it on error."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        self.refused = self.refused or getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and error.errno in _PASSING:
            return
        # Otherwise every flush, including that at exit, would try to write the buffer again.
        with suppress(OSError, ValueError):  # the stream may be closed
            silence(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
