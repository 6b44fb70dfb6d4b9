"""Documents: a text field of the rows of files.

It makes tokens of one row's text; files, shards and rows of tokens are ``text_rows``'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from axonlaunch.data.encoding import Encoded
from axonlaunch.data.rows import Row
from axonlaunch.data.tokenizer import Tokenizer


class DocumentEncoder:
    """Makes a document of each row's text.

    Attributes:
        fingerprint: Of the tokenizer and the field.
        vocab_size: Of the tokenizer.
    """

    masks = False

    def __init__(self, tokenizer: Tokenizer, *, field: str) -> None:
        """Choose a tokenizer and the field that holds the text."""
        self._tokenizer = tokenizer
        self._field = field
        text = json.dumps(["documents", tokenizer.fingerprint, field])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.vocab_size = tokenizer.vocab_size

    def columns(self, names: list[str]) -> list[str]:
        """Return which of a table's columns it reads; all where that of the text is missing."""
        return text_columns(names, field=self._field)

    def cancel(self) -> None:
        """End the call that another thread waits for."""
        self._tokenizer.cancel()

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return a document of each row, but for those that have no token to predict."""
        texts: list[str] = []
        places: list[int] = []
        bad: list[tuple[int, str]] = []
        for place, row in enumerate(rows):
            text: Any = row if isinstance(row, str) else row.get(self._field)
            if reason := _why_no_text(text, row, self._field):
                bad.append((place, reason))
            else:
                texts.append(text)
                places.append(place)
        documents = self._tokenizer.documents(texts)
        used = [index for index, document in enumerate(documents) if len(document) > 1]
        none = np.empty(0, dtype=np.uint32)
        return Encoded(
            tokens=np.concatenate([none, *(documents[index] for index in used)]),
            lengths=np.array([len(documents[index]) for index in used], dtype=np.int64),
            rows=np.array([places[index] for index in used], dtype=np.int64),
            counted=None,
            empty=len(documents) - len(used),
            bad=tuple(bad),
        )


def text_columns(names: list[str], *, field: str) -> list[str]:
    """Return which of a table's columns documents are made of; all where that is missing."""
    return [field] if field in names else names


def _why_no_text(text: object, row: Row | str, field: str) -> str | None:
    """Return why a row's text is none; None where it is one."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{field} has half of a surrogate pair, which is no character"
        return None
    if isinstance(row, dict) and field not in row:
        return f"has no field {field}; it has {', '.join(map(str, row)) or 'none'}"
    return f"{field} is {'null' if text is None else type(text).__name__}, not text"
