"""Encodes the chats of rows as documents of tokens.

Reading files, shards and packing rows of tokens are in other modules (``text_rows``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date

import numpy as np

from axonlaunch.data.files.rows import BadRow, Row
from axonlaunch.data.shards.encoding import Encoded
from axonlaunch.data.texts.chats.chat_rows import Chat, chat_columns, read_chat
from axonlaunch.data.texts.chats.chat_template import ChatTemplate, Written
from axonlaunch.data.texts.chats.computed_fields import (
    compile_fields,
    expressions,
    with_computed,
)
from axonlaunch.data.tokenizers.tokenizer import PretrainedTokenizer, Tokenizer

_FORMAT = "chat 9"
"""Changed whenever chats are encoded or refused differently; cached tokens are then invalid."""


class ChatEncoder:
    """Encodes each row's chat as a document.

    Attributes:
        fingerprint: Hash of the tokenizer, its template and the choice of counted tokens.
        vocab_size: Vocabulary size of the tokenizer.
        masks: Whether only the assistant's tokens count as targets.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        fields: Mapping[str, str],
        assistant_only: bool,
        day: str | None = None,
    ) -> None:
        """Load the chat template.

        Args:
            tokenizer: Tokenizer with a chat template.
            fields: Names of columns and keys by what they hold.
            assistant_only: Whether only the assistant's tokens count as targets.
            day: Day in ISO format that a template with a date writes; None: today.

        Raises:
            ConfigError: The tokenizer has no chat template, or a computed field is no Jinja.
        """
        compile_fields(fields)
        today = date.today().isoformat()
        self._template = ChatTemplate(tokenizer, marks_assistant=assistant_only, day=day or today)
        self._tokenizer, self._fields = tokenizer, dict(fields)
        template = self._template.fingerprint
        text = json.dumps([_FORMAT, tokenizer.fingerprint, template, self._fields, assistant_only])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.vocab_size = tokenizer.vocab_size
        self.masks = assistant_only

    def columns(self, names: list[str]) -> list[str]:
        """Return the columns to read; all, if no form of a chat is recognized."""
        return chat_columns(names, fields=self._fields)

    def cancel(self) -> None:
        """End the call that another thread waits for."""
        self._tokenizer.cancel()

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return a document for each row. A row without counted tokens is a bad row."""
        chats: list[Chat] = []
        positions: list[int] = []
        bad: list[tuple[int, Written | BadRow]] = []
        for position, row in enumerate(self._with_computed(rows)):
            try:
                if isinstance(row, BadRow):
                    raise ValueError(row.reason)
                chats.append(self._read(row))
                positions.append(position)
            except ValueError as error:
                bad.append((position, BadRow(str(error))))
        written = [
            each if isinstance(each, BadRow) or _counts(each) else BadRow(_nothing_counts(chat))
            for chat, each in zip(chats, self._template.write(chats), strict=True)
        ]
        return join_documents([*bad, *zip(positions, written, strict=True)], masks=self.masks)

    def _with_computed(self, rows: Sequence[Row | str]) -> Sequence[Row | str | BadRow]:
        """Return rows with computed fields; the texts of fields run in a copy of this process."""
        if not expressions(self._fields):
            return rows
        assert isinstance(self._tokenizer, PretrainedTokenizer)  # bytes have no chat template
        size = sum(len(str(row)) for row in rows)
        return self._tokenizer.call_isolated(
            _compute, list(rows), self._fields, characters=size, what="data.fields"
        )

    def _read(self, row: Row | str) -> Chat:
        """Return the chat of a row.

        Raises:
            ValueError: The row is not a chat, or asks for what ``data.train_on`` excludes.
        """
        chat = read_chat(row, fields=self._fields)
        if chat.uncounted and not self.masks:
            raise ValueError(
                f"message {min(chat.uncounted) + 1} has a flag that leaves it out of the loss, "
                "and data.train_on=all counts every token; use data.train_on=assistant"
            )
        return chat


def _compute(
    _: PretrainedTokenizer, rows: list[Row | str], fields: Mapping[str, str]
) -> list[Row | str | BadRow]:
    return [row if isinstance(row, str) else _computed_or_bad(row, fields) for row in rows]


def _computed_or_bad(row: Row, fields: Mapping[str, str]) -> Row | BadRow:
    try:
        return with_computed(row, fields)
    except ValueError as error:
        return BadRow(str(error))


def join_documents(written: Iterable[tuple[int, Written | BadRow]], *, masks: bool) -> Encoded:
    """Return the documents of rows.

    Args:
        written: Index of each row in the input, and its tokens or why it is bad.
        masks: Whether some tokens do not count as targets.
    """
    tokens, counted, used = [np.empty(0, np.uint32)], [np.empty(0, np.uint8)], []
    bad = []
    for position, each in written:
        if isinstance(each, BadRow):
            bad.append((position, each.reason))
            continue
        ids, mask = each
        tokens.append(ids)
        counted.append(np.ones(len(ids), np.uint8) if mask is None else mask)
        used.append(position)
    return Encoded(
        tokens=np.concatenate(tokens),
        lengths=np.array([len(each) for each in tokens[1:]], dtype=np.int64),
        rows=np.array(used, dtype=np.int64),
        counted=np.concatenate(counted) if masks else None,
        bad=tuple(sorted(bad)),
    )


def _counts(written: Written) -> bool:
    """Return whether a token after the first counts."""
    tokens, mask = written
    return len(tokens) > 1 if mask is None else bool(mask[1:].any())


def _nothing_counts(chat: Chat) -> str:
    roles = ", ".join(dict.fromkeys(message["role"] for message in chat.messages))
    if any(chat.counts(number) for number in range(len(chat.messages))):
        return "no token counts: the chat template does not mark the assistant's tokens"
    if any(message["role"] == "assistant" for message in chat.messages):
        return "no token counts: no message of the assistant does; remove the flags, or the row"
    return (
        f"no token counts: its roles are {roles}; write assistant, or data.fields={{assistant: "
        "NAME}, or use data.train_on=all"
    )
