"""Interface of encoders, their result, and the progress shown while they run.

``documents`` and ``chat`` implement encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from axonlaunch.data.files.rows import Row

_BAR = 24
"""Width of a progress bar in characters."""


@dataclass(frozen=True)
class Encoded:
    """Documents of some rows.

    Attributes:
        tokens: Tokens of all documents, concatenated.
        lengths: Number of tokens of each document.
        rows: Index of each document's row in the input.
        counted: Whether each token counts as a target, uint8; None: all do.
        empty: Number of rows without a token that is a target.
        bad: ``(index, reason)`` of invalid rows.
    """

    tokens: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    counted: npt.NDArray[np.uint8] | None
    empty: int = 0
    bad: tuple[tuple[int, str], ...] = ()


class Encoder(Protocol):
    """Encodes rows as documents.

    Attributes:
        fingerprint: Hash of everything that decides the result, except the rows.
        vocab_size: One more than the largest token.
        masks: Whether some tokens do not count as targets.
    """

    fingerprint: str
    vocab_size: int
    masks: bool

    def columns(self, names: list[str]) -> list[str]:
        """Return the columns of a table to read; all, if a required one is missing."""

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return the documents of rows, in their order; a row may have no document.

        Raises:
            IsolatedCallError: The tokenizer took too long, or too much memory.
        """

    def cancel(self) -> None:
        """End the call of ``encode`` that another thread waits for."""


@dataclass(frozen=True)
class Tokenizing:
    """Progress as shown to a user.

    Attributes:
        file: Path or URL of the current file.
        fraction: Fraction of all files' bytes that is done.
        tokens: Number of tokens so far.
        waits: Whether this process waits for another one that tokenizes the file.
        learns: Whether a tokenizer is being learned from the text.
        verifies: Whether cached tokens are being compared with their checksums.
    """

    file: str
    fraction: float
    tokens: int = 0
    waits: bool = False
    learns: bool = False
    verifies: bool = False

    def __str__(self) -> str:
        if self.learns:
            return f"learning a tokenizer from {self.file}"
        if self.verifies:
            return f"verifying {self.fraction:.0%} of the tokens, {self.file}"
        if self.waits:
            return f"waiting for another process that tokenizes {self.file}"
        done = round(self.fraction * _BAR)
        bar = "█" * done + "░" * (_BAR - done)
        return f"tokenizing {bar} {self.fraction:.0%}, {self.tokens:,} tokens, {self.file}"


OnProgress = Callable[[Tokenizing], None]
