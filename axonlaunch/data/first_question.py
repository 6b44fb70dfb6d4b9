"""What a run on chats asks its model when it ends: a question of its own data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice

from axonlaunch.config.documents import ChatConfig, TextRowsConfig
from axonlaunch.data.chat_rows import chat_columns, read_chat
from axonlaunch.data.rows import BadRow, Row, RowReader
from axonlaunch.data.sources import find_sources

_LOOKED_AT = 100
_LONGEST = 400
"""Characters: with an answer it is to fit the context of a small model."""
_GREETING = "Hello"


def first_question(config: TextRowsConfig) -> str:
    """Return the first short message of a user, of files that are held out or else trained on.

    Of a mix it is of its first source of chats.
    """
    sources = config.sources().values() or [config]
    chats = next(
        (config_of_chats for config_of_chats in sources if isinstance(config_of_chats, ChatConfig)),
        None,
    )
    if chats is None:
        return _GREETING
    files = chats.held_out if isinstance(chats.held_out, list) else chats.files
    for source in find_sources(files)[:1]:
        columns = partial(chat_columns, field=chats.messages_field)
        for _, row in islice(RowReader(source, columns=columns), _LOOKED_AT):
            for question in () if isinstance(row, BadRow) else _questions(row, chats):
                if question.strip() and len(question) <= _LONGEST:
                    return question
    return _GREETING


def _questions(row: Row | str, config: ChatConfig) -> Iterator[str]:
    try:
        chat = read_chat(row, field=config.messages_field)
    except ValueError:
        return
    for message in chat.messages:
        if message["role"] == "user" and isinstance(message.get("content"), str):
            yield message["content"]
            return
