"""Encodes the chats of rows as documents of tokens.

Reading files, shards and packing rows of tokens are in other modules (``text_rows``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from axonlaunch.data.files.rows import BadRow, Row
from axonlaunch.data.shards.encoding import Encoded
from axonlaunch.data.texts.chat_rows import Chat, chat_columns, read_chat
from axonlaunch.data.texts.chat_template import ChatTemplate
from axonlaunch.data.tokenizers.tokenizer import Tokenizer

_FORMAT = "chat 3"
"""Changed whenever chats are encoded or refused differently; cached tokens are then invalid."""


class ChatEncoder:
    """Encodes each row's chat as a document.

    Attributes:
        fingerprint: Hash of the tokenizer, its template and the choice of counted tokens.
        vocab_size: Vocabulary size of the tokenizer.
        masks: Whether only the assistant's tokens count as targets.
    """

    def __init__(self, tokenizer: Tokenizer, *, field: str | None, assistant_only: bool) -> None:
        """Load the chat template.

        Args:
            tokenizer: Tokenizer with a chat template.
            field: Name of the field with the messages; None: recognised by its name.
            assistant_only: Whether only the assistant's tokens count as targets.

        Raises:
            ConfigError: The tokenizer has no chat template.
        """
        self._template = ChatTemplate(tokenizer, marks_assistant=assistant_only)
        self._tokenizer, self._field = tokenizer, field
        template = self._template.fingerprint
        text = json.dumps([_FORMAT, tokenizer.fingerprint, template, field, assistant_only])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.vocab_size = tokenizer.vocab_size
        self.masks = assistant_only

    def columns(self, names: list[str]) -> list[str]:
        """Return the columns to read; all, if no form of a chat is recognised."""
        return chat_columns(names, field=self._field)

    def cancel(self) -> None:
        """End the call that another thread waits for."""
        self._tokenizer.cancel()

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return a document for each row. A row without counted tokens is a bad row."""
        chats: list[Chat] = []
        positions: list[int] = []
        bad: list[tuple[int, str]] = []
        for position, row in enumerate(rows):
            try:
                chats.append(read_chat(row, field=self._field))
                positions.append(position)
            except ValueError as error:
                bad.append((position, str(error)))
        tokens, counted, used = [np.empty(0, np.uint32)], [np.empty(0, np.uint8)], []
        rendered = self._template.write(chats)
        for position, chat, written in zip(positions, chats, rendered, strict=True):
            if isinstance(written, BadRow):
                bad.append((position, written.reason))
                continue
            ids, mask = written
            mask = np.ones(len(ids), np.uint8) if mask is None else mask
            if not mask[1:].any():
                bad.append((position, _nothing_counts(chat)))
                continue
            tokens.append(ids)
            counted.append(mask)
            used.append(position)
        return Encoded(
            tokens=np.concatenate(tokens),
            lengths=np.array([len(each) for each in tokens[1:]], dtype=np.int64),
            rows=np.array(used, dtype=np.int64),
            counted=np.concatenate(counted) if self.masks else None,
            bad=tuple(sorted(bad)),
        )


def _nothing_counts(chat: Chat) -> str:
    roles = ", ".join(dict.fromkeys(message["role"] for message in chat.messages))
    if any(message["role"] == "assistant" for message in chat.messages):
        return "no token counts: the chat template does not mark the assistant's tokens"
    return f"no token counts: its roles are {roles}; write assistant, or use data.train_on=all"
