"""Standard output and error of a process that outlives whoever reads them.

Writing to them raises nothing: what can't be shown is dropped, for a run is not ended by its
console. Nothing here formats what is written.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

_PASSING = (errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
"""What may be over by the next line: a pipe or a disk that is full. A reader that has left, or a
terminal that was closed (EPIPE, EIO), does not come back."""


def open_missing() -> None:
    """Open /dev/null in place of standard descriptors that whoever started us closed (``>&-``).

    Called before anything else opens a file: it would get the number of standard output, and take
    what is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            silence(descriptor)
    # Python has None for what it found closed.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", buffering=1, closefd=False)


def silence(*descriptors: int) -> None:
    """Let what is written to descriptors go nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        if descriptor == null:  # the lowest number that was free
            os.set_inheritable(null, True)
        else:
            os.dup2(null, descriptor)
    if null not in descriptors:
        os.close(null)


def tolerant(stream: TextIO) -> TextIO:
    """Return a stream that writes to another one and never raises."""
    return cast("TextIO", stream if isinstance(stream, _Tolerant) else _Tolerant(stream))


def refusal(stream: TextIO) -> str | None:
    """Return why a tolerant stream dropped something, at first; None where it dropped nothing."""
    return stream.refused if isinstance(stream, _Tolerant) else None


class _Tolerant:
    """Passes text on; errors end nothing.

    Attributes:
        refused: The first of them; None where there was none.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.refused: str | None = None
        if hasattr(
            stream, "reconfigure"
        ):  # a character that the terminal lacks ends nothing either
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        self.refused = self.refused or getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and error.errno in _PASSING:
            return
        # What is buffered would be tried again at every flush, the last one at exit.
        with suppress(OSError, ValueError):  # it is closed
            silence(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
