"""Chats: the messages of the rows of files.

It makes tokens of one row's messages; files, shards and rows of tokens are ``text_rows``'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from axonlaunch.data.chat_rows import Chat, chat_columns, read_chat
from axonlaunch.data.chat_template import ChatTemplate
from axonlaunch.data.encoding import Encoded
from axonlaunch.data.rows import BadRow, Row
from axonlaunch.data.tokenizer import Tokenizer

_FORMAT = "chat 3"
"""Changes with what is made of a chat, or refused: tokens that were kept are not those any more."""


class ChatEncoder:
    """Makes a document of each row's chat.

    Attributes:
        fingerprint: Of the tokenizer, its template and what counts.
        vocab_size: Of the tokenizer.
        masks: Whether only what the assistant says counts.
    """

    def __init__(self, tokenizer: Tokenizer, *, field: str | None, assistant_only: bool) -> None:
        """Choose a tokenizer, the field that holds the messages, and what counts.

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
        """Return which of a table's columns it reads; all where they are of no form of a chat."""
        return chat_columns(names, field=self._field)

    def cancel(self) -> None:
        """End the call that another thread waits for."""
        self._tokenizer.cancel()

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return a document of each row; one of which no token counts is a bad row."""
        chats: list[Chat] = []
        places: list[int] = []
        bad: list[tuple[int, str]] = []
        for place, row in enumerate(rows):
            try:
                chats.append(read_chat(row, field=self._field))
                places.append(place)
            except ValueError as error:
                bad.append((place, str(error)))
        tokens, counted, used = [np.empty(0, np.uint32)], [np.empty(0, np.uint8)], []
        for place, chat, written in zip(places, chats, self._template.write(chats), strict=True):
            if isinstance(written, BadRow):
                bad.append((place, written.reason))
                continue
            ids, says = written
            says = np.ones(len(ids), np.uint8) if says is None else says
            if not says[1:].any():
                bad.append((place, _nothing_counts(chat)))
                continue
            tokens.append(ids)
            counted.append(says)
            used.append(place)
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
        return "no token counts: the chat template marks none of the assistant's"
    return f"no token counts: its roles are {roles}; write assistant, or use data.train_on=all"
