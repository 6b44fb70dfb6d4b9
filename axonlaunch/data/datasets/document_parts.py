"""Records for documents in packed rows and for statistics of a text dataset.

``text_rows`` creates them.
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
        start: Index of its first token among all tokens of the dataset.
        tokens: Tokens. Each except the last is an input, each except the first a target.
        counted: Whether each token counts as a target.
        left: Number of tokens from the first one to the end of the document; None: not computed.
    """

    start: int
    tokens: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]
    left: int | None = None


@dataclass(frozen=True)
class TextSummary:
    """Statistics of a text dataset.

    Attributes:
        documents: Number of documents or chats, including held-out ones.
        tokens: Number of tokens in all documents.
        counted_tokens: Number of tokens that count as targets.
        longest_document: Number of tokens of the longest document.
        rows: Number of training rows.
        held_out_rows: Number of held-out rows.
        row_tokens: Number of positions in a row.
        filled: Fraction of the positions in training rows that documents fill.
        too_long: Number of documents that were longer than a row.
        skipped_rows: Number of rows of files that could not be read.
        empty_rows: Number of rows of files that have no token to predict.
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
        """Return the combined statistics of several parts of a dataset."""
        totals = {
            field.name: sum(getattr(part, field.name) for part in parts) for field in fields(cls)
        }
        totals["longest_document"] = max(part.longest_document for part in parts)
        totals["row_tokens"] = parts[0].row_tokens
        filled = sum(part.filled * part.rows for part in parts) / max(1, totals["rows"])
        return cls(**{**totals, "filled": filled})
