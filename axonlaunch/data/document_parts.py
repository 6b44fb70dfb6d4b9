"""What a row of text holds, and how much there is of a dataset of text.

It holds the forms; ``text_rows`` fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DocumentPart:
    """A document, or a part of one, in a row.

    Attributes:
        start: Where its first token stands among all.
        tokens: Its tokens, of which each but the last is an input and each but the first a target.
        counted: Whether each counts as a target.
        left: Tokens from the first one to the end of the document; None if nobody asked.
    """

    start: int
    tokens: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]
    left: int | None = None


@dataclass(frozen=True)
class TextSummary:
    """How much there is of a dataset of text.

    Attributes:
        documents: Documents or chats, held-out ones included.
        tokens: Of them.
        counted_tokens: Of these, those that count as targets.
        longest_document: Its tokens.
        rows: To train on.
        held_out_rows: To evaluate on.
        row_tokens: Places of a row.
        filled: Share of the places of rows to train on that a document takes.
        too_long: Documents that were longer than a row.
        skipped_rows: Rows of files that could not be read.
        empty_rows: Rows of files that have no token to predict.
    """

    documents: int
    tokens: int
    counted_tokens: int
    longest_document: int
    rows: int
    held_out_rows: int
    row_tokens: int
    filled: float
    too_long: int
    skipped_rows: int
    empty_rows: int

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """Return what several parts of a dataset are together."""
        totals = {
            field.name: sum(getattr(part, field.name) for part in parts) for field in fields(cls)
        }
        totals["longest_document"] = max(part.longest_document for part in parts)
        totals["row_tokens"] = parts[0].row_tokens
        filled = sum(part.filled * part.rows for part in parts) / max(1, totals["rows"])
        return cls(**{**totals, "filled": filled})
