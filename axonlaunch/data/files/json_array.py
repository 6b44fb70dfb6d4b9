"""Reads the elements of a JSON array one by one, so that the file need not fit in memory."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import Any

_BLOCK = 1 << 20
_ENDS = " \t\n\r,]"
"""Characters that may follow an element."""
_BLANK = re.compile(r"[ \t\n\r]*")
_NEAR_END = 16
"""Characters before the end of a block in which an error may be due to the block's end."""
_DECODER = json.JSONDecoder()


class TooLongElementError(ValueError):
    """An element of the array is longer than the limit."""


def elements(stream: io.BufferedReader, *, longest: int) -> Iterator[Any]:
    """Yield the elements of an array.

    Args:
        stream: Stream at the beginning of the array, in UTF-8, UTF-16 or UTF-32.
        longest: Maximum number of characters of an element.

    Raises:
        TooLongElementError: An element is longer.
        ValueError: The text is not a JSON array, or not in one of these encodings.
        RecursionError: An element is nested too deeply.
    """
    yield from _Parser(stream, longest).elements()


class _Parser:
    """Incremental parser of an array; only a part of the text is in memory."""

    def __init__(self, stream: io.BufferedReader, longest: int) -> None:
        encoding = json.detect_encoding(stream.peek(4)[:4])
        self._stream, self._longest = stream, longest
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._part, self._at, self._is_last = "", 0, False
        self._number = 0

    def elements(self) -> Iterator[Any]:
        """Yield the elements."""
        self._expect("[")
        if self._next_mark() == "]":
            self._at += 1
        else:
            while True:
                yield self._element()
                if (mark := self._next_mark()) == "]":
                    self._at += 1
                    break
                self._expect(",", actual=mark)
        if extra := self._next_mark():
            raise ValueError(f"{extra!r} follows the end of the array")

    def _element(self) -> Any:
        self._number += 1
        self._next_mark()
        more = _BLOCK
        while True:
            try:
                value, end = _DECODER.raw_decode(self._part, self._at)
                is_near_end = end > len(self._part) - _NEAR_END
                is_ended = end < len(self._part) and self._part[end] in _ENDS
                if is_ended or not is_near_end or self._is_last:  # a number may continue
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string")
                if self._is_last or not (is_cut or error.pos >= len(self._part) - _NEAR_END):
                    column = error.pos - self._at + 1
                    message = (
                        f"row {self._number} is not JSON: {error.msg} at its character {column}"
                    )
                    raise ValueError(message) from None
            if len(self._part) - self._at > self._longest:
                message = f"row {self._number} has more than {self._longest:,} characters; split it"
                raise TooLongElementError(message)
            self._read(more)
            more *= 2

    def _next_mark(self) -> str:
        """Skip blanks; return the character after them, empty at the end."""
        while True:
            blank = _BLANK.match(self._part, self._at)
            assert blank is not None
            self._at = blank.end()
            if self._at < len(self._part) or self._is_last:
                return self._part[self._at : self._at + 1]
            self._read(_BLOCK)

    def _expect(self, mark: str, *, actual: str | None = None) -> None:
        actual = self._next_mark() if actual is None else actual
        if actual != mark:
            position = f"after row {self._number}" if self._number else "at the beginning"
            what = repr(actual) if actual else "the end of the file"
            raise ValueError(f"expected {mark!r} {position}, found {what}")
        self._at += 1

    def _read(self, count: int) -> None:
        block = self._stream.read(count)
        self._is_last = not block
        text = self._decoder.decode(block, final=self._is_last)
        self._part, self._at = self._part[self._at :] + text, 0
