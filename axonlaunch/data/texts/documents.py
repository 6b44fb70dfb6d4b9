"""Encodes a text field of rows as documents of tokens.

Reading files, shards and packing rows of tokens are in other modules (``text_rows``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from axonlaunch.data.files.rows import Row
from axonlaunch.data.shards.encoding import Encoded
from axonlaunch.data.tokenizers.tokenizer import Tokenizer


class DocumentEncoder:
    """Encodes each row's text as a document.

    Attributes:
        fingerprint: Hash of the tokenizer and the field.
        vocab_size: Vocabulary size of the tokenizer.
    """

    masks = False

    def __init__(self, tokenizer: Tokenizer, *, field: str) -> None:
        """Store the tokenizer and the name of the text field."""
        self._tokenizer = tokenizer
        self._field = field
        text = json.dumps(["documents", tokenizer.fingerprint, field])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.vocab_size = tokenizer.vocab_size

    def columns(self, names: list[str]) -> list[str]:
        """Return the columns to read; all, if the text field is missing."""
        return text_columns(names, field=self._field)

    def cancel(self) -> None:
        """End the call that another thread waits for."""
        self._tokenizer.cancel()

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return a document for each row, except rows that have no token to predict."""
        texts: list[str] = []
        positions: list[int] = []
        bad: list[tuple[int, str]] = []
        for position, row in enumerate(rows):
            text: Any = row if isinstance(row, str) else row.get(self._field)
            if reason := _why_no_text(text, row, self._field):
                bad.append((position, reason))
            else:
                texts.append(text)
                positions.append(position)
        documents = self._tokenizer.documents(texts)
        used = [index for index, document in enumerate(documents) if len(document) > 1]
        empty = np.empty(0, dtype=np.uint32)
        return Encoded(
            tokens=np.concatenate([empty, *(documents[index] for index in used)]),
            lengths=np.array([len(documents[index]) for index in used], dtype=np.int64),
            rows=np.array([positions[index] for index in used], dtype=np.int64),
            counted=None,
            empty=len(documents) - len(used),
            bad=tuple(bad),
        )


def text_columns(names: list[str], *, field: str) -> list[str]:
    """Return the columns of a table that documents need; all, if the field is missing."""
    return [field] if field in names else names


def _why_no_text(text: object, row: Row | str, field: str) -> str | None:
    """Return why a row has no valid text; None if it has."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{field} has an unpaired surrogate, which is not a character"
        return None
    if isinstance(row, dict) and field not in row:
        return f"has no field {field}; it has {', '.join(map(str, row)) or 'none'}"
    return f"field {field} is {'null' if text is None else type(text).__name__}, not text"
