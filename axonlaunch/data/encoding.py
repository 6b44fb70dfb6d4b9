"""What makes documents of rows, what it gives, and what is shown while it does.

It holds the forms; documents and chats are made in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from axonlaunch.data.rows import Row

_BAR = 24
"""Characters of a progress bar."""


@dataclass(frozen=True)
class Encoded:
    """Documents of some rows.

    Attributes:
        tokens: Of all, one after another.
        lengths: Tokens of each document.
        rows: Which row each is of, by its place among those that were given.
        counted: For each token whether it counts as a target, uint8; None: all do.
        empty: Rows of which no token is a target.
        bad: ``(place, reason)`` of rows that are none.
    """

    tokens: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    counted: npt.NDArray[np.uint8] | None
    empty: int = 0
    bad: tuple[tuple[int, str], ...] = ()


class Encoder(Protocol):
    """Makes documents of rows.

    Attributes:
        fingerprint: Of all that decides what comes out, beside the rows.
        vocab_size: One more than the largest token.
        masks: Whether some tokens don't count.
    """

    fingerprint: str
    vocab_size: int
    masks: bool

    def columns(self, names: list[str]) -> list[str]:
        """Return which of a table's columns it reads; all where what it needs is not there."""

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return the documents of rows, in their order; a row may have none.

        Raises:
            IsolatedCallError: The tokenizer took too long, or too much memory.
        """

    def cancel(self) -> None:
        """End the call of ``encode`` that another thread waits for."""


@dataclass(frozen=True)
class Tokenising:
    """What a user who waits is shown.

    Attributes:
        file: Path or URL.
        fraction: Share of all files' bytes that is done.
        tokens: Made so far.
        waits: Whether another process makes them, and this one waits.
        learns: Whether a tokenizer is learned of the text.
        verifies: Whether tokens that are there are compared with their checksums.
    """

    file: str
    fraction: float
    tokens: int = 0
    waits: bool = False
    learns: bool = False
    verifies: bool = False

    def __str__(self) -> str:
        if self.learns:
            return f"learning a tokenizer of {self.file}"
        if self.verifies:
            return f"verifying {self.fraction:.0%} of the tokens, {self.file}"
        if self.waits:
            return f"waiting for another process that tokenises {self.file}"
        done = round(self.fraction * _BAR)
        bar = "█" * done + "░" * (_BAR - done)
        return f"tokenising {bar} {self.fraction:.0%}, {self.tokens:,} tokens, {self.file}"


OnProgress = Callable[[Tokenising], None]
