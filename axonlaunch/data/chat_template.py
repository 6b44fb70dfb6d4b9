"""Chats written out by a tokenizer's chat template, and which of their tokens the assistant says.

The template's ``{% generation %}`` marks say it where it has them. Elsewhere each turn of the
assistant is what it adds to the text; where that is not unambiguous, a chat is refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.data.chat_rows import Chat, Message
from axonlaunch.data.rows import BadRow
from axonlaunch.data.tables import LARGEST_ROW
from axonlaunch.data.tokenizer import PretrainedTokenizer, Tokenizer

_SPOKEN = ("reasoning_content", "tool_calls", "function_call")
"""What a message says beside its content."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BLAMED = "the chat template, or the tokenizer,"
_Result = TypeVar("_Result")
_Span = tuple[int, int]
Written = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8] | None]
"""A chat's tokens, and for each whether the assistant says it; None: all count."""


class ChatTemplate:
    """Writes chats as the tokenizer's template does.

    Attributes:
        fingerprint: Of the template.
    """

    def __init__(self, tokenizer: Tokenizer, *, marks_assistant: bool) -> None:
        """Look for the template.

        Args:
            tokenizer: What has it.
            marks_assistant: Whether to find the tokens that the assistant says.

        Raises:
            ConfigError: There is no template, or those tokens can't be found by this tokenizer.
        """
        where = "tokenizer.path"
        if not isinstance(tokenizer, PretrainedTokenizer):
            message = (
                "null stands for bytes, which have no chat template; use a folder that has "
                "one, or tokenizer=train"
            )
            raise ConfigError([ConfigIssue(where, message)])
        self._owner, loaded = tokenizer, tokenizer.transformers
        self.fingerprint = tokenizer.template_fingerprint
        try:
            loaded.get_chat_template()
        except ValueError:
            message = (
                "the tokenizer has no chat template; use that of the model's instruct version, or "
                "put a chat_template.jinja into the folder"
            )
            raise ConfigError([ConfigIssue(where, message)]) from None
        if marks_assistant and not loaded.is_fast:
            message = (
                "the tokenizer has no tokenizer.json, by which the assistant's tokens are found; "
                "use one that has, or data.train_on=all"
            )
            raise ConfigError([ConfigIssue(where, message)])
        self._marks_assistant = marks_assistant

    def write(self, chats: Sequence[Chat]) -> list[Written | BadRow]:
        """Return of each chat its tokens, or why the template can't write it.

        Raises:
            IsolatedCallError: The template took too long, or too much memory.
        """
        size = sum(len(str(chat.messages)) for chat in chats)
        return self._call(_write, self._marks_assistant, list(chats), characters=size)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens by which the assistant is asked to answer messages.

        Raises:
            ValueError: The template refuses them.
        """
        return self._call(_prompt, list(messages), characters=len(str(messages)))

    def end_of_turn(self) -> str:
        """Return what the template writes behind what the assistant says.

        Raises:
            ValueError: The template refuses a question and an answer.
        """
        return self._call(_end_of_turn, characters=0)

    def _call(self, function: Callable[..., _Result], *args: Any, characters: int) -> _Result:
        return self._owner.call_isolated(function, *args, characters=characters, what=_BLAMED)


def _write(
    tokenizer: PretrainedTokenizer, marks_assistant: bool, chats: list[Chat]
) -> list[Written | BadRow]:
    return _Writer(tokenizer.transformers, marks_assistant=marks_assistant).write(chats)


def _prompt(tokenizer: PretrainedTokenizer, messages: list[Message]) -> list[int]:
    return _Writer(tokenizer.transformers, marks_assistant=False).prompt(messages)


def _end_of_turn(tokenizer: PretrainedTokenizer) -> str:
    return _Writer(tokenizer.transformers, marks_assistant=False).end_of_turn()


class _Writer:
    """Writes chats in this process, by templates and tokenizers that may be a stranger's."""

    def __init__(self, tokenizer: Any, *, marks_assistant: bool) -> None:
        self._tokenizer = tokenizer
        self._marks_assistant = marks_assistant
        self._has_marks = bool(_MARKS.search(tokenizer.get_chat_template()))

    def write(self, chats: Sequence[Chat]) -> list[Written | BadRow]:
        texts = [self._text(chat) for chat in chats]
        pairs = zip(chats, texts, strict=True)
        good = [(chat, text) for chat, text in pairs if not isinstance(text, BadRow)]
        by_marks = self._marks_assistant and self._has_marks
        written = iter(self._mark_tokens(good) if by_marks else self._by_turns(good))
        return [text if isinstance(text, BadRow) else next(written) for text in texts]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        text = self._render(messages, None, asks=True)
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def end_of_turn(self) -> str:
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "OK"}
        asked = self._render([question], None, asks=True)
        whole = self._render([question, answer], None)
        return whole[_common(asked, whole) :].partition("OK")[2].strip()

    def _text(self, chat: Chat) -> str | BadRow:
        """Return what the template makes of a chat, all of it."""
        try:
            text = self._render(chat.messages, chat)
        except ValueError as error:
            return BadRow(str(error))
        lost = next(self._lost_parts(chat, text), None)
        return text if lost is None else BadRow(f"the chat template leaves out {lost}")

    def _lost_parts(self, chat: Chat, text: str) -> Iterator[str]:
        """Yield what of a chat makes no difference to the text.

        Earlier turns may lose their reasoning: it is looked for as if no turn followed.
        """
        if chat.tools is not None and self._writes_alike(chat.messages, Chat([]), text):
            yield "tools"
        for number, message in enumerate(chat.messages, start=1):
            before, after = chat.messages[: number - 1], chat.messages[number:]
            which = f"message {number}, of role {message['role']}"
            is_again = number > 1 and message["role"] == "system"
            if not _is_written(message, text) or (
                is_again and self._writes_alike([*before, *after], chat, text)
            ):
                yield which
            for key in (key for key in _SPOKEN if message.get(key)):
                shorter = {name: value for name, value in message.items() if name != key}
                try:
                    whole = self._render([*before, message], chat)
                except ValueError:  # what it refuses to end with it has looked at
                    continue
                if self._writes_alike([*before, shorter], chat, whole):
                    yield f"{key} of {which}"

    def _writes_alike(self, messages: Sequence[Message], chat: Chat, text: str) -> bool:
        """Say whether messages are written as a text is, with the tools of a chat."""
        try:
            return self._render(messages, chat) == text
        except ValueError:
            return False

    def _mark_tokens(self, chats: Sequence[tuple[Chat, str]]) -> Iterator[Written]:
        """Yield tokens by the template's marks; chats that have the same tools go together."""
        for tools, group in itertools.groupby((chat for chat, _ in chats), lambda one: one.tools):
            rendered = self._tokenizer.apply_chat_template(
                [chat.messages for chat in group],
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            for tokens, says in zip(
                rendered["input_ids"], rendered["assistant_masks"], strict=True
            ):
                yield np.array(tokens, dtype=np.uint32), np.array(says, dtype=np.uint8)

    def _by_turns(self, chats: Sequence[tuple[Chat, str]]) -> list[Written | BadRow]:
        """Return tokens, and which are the assistant's by what its turns add, if that is asked."""
        if not chats:
            return []
        rendered = self._tokenizer(
            [text for _, text in chats],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=self._marks_assistant,
        )
        written: list[Written | BadRow] = []
        for place, (chat, text) in enumerate(chats):
            tokens, says = np.array(rendered["input_ids"][place], dtype=np.uint32), None
            if self._marks_assistant:
                try:
                    turns = self._turns(chat, text)
                except ValueError as error:
                    written.append(BadRow(str(error)))
                    continue
                says = _overlapping(
                    np.array(rendered["offset_mapping"][place]).reshape(-1, 2), turns
                )
            written.append((tokens, says))
        return written

    def _turns(self, chat: Chat, text: str) -> list[_Span]:
        """Return what each turn of the assistant adds to the text.

        Raises:
            ValueError: That is ambiguous.
        """
        roles = enumerate(message["role"] for message in chat.messages)
        return [self._turn(chat, number, text) for number, role in roles if role == "assistant"]

    def _turn(self, chat: Chat, number: int, text: str) -> _Span:
        """Return what a turn of the assistant adds to the text.

        It begins where the text ends that asks for it, ``<|im_start|>assistant``. It ends as the
        chat does that ends with it. Some templates leave the reasoning out of turns that are not
        the last, so the end of what it adds has to be found again in the whole text.

        Raises:
            ValueError: The texts do not agree.
        """
        if not number:
            raise ValueError(
                "begins with the assistant, and the chat template has no {% generation %} marks "
                "that say which tokens it says; put another message before it"
            )
        before, message = chat.messages[:number], chat.messages[number]
        start = _common(self._render(before, chat, asks=True), text)
        added = self._render([*before, message], chat)[start:]
        rest = text[start:]
        length = len(added) if rest.startswith(added) else _overlap(added, rest)
        is_after = start >= len(self._render(before, chat))
        if not is_after or not length or _last_line(message) not in rest[:length]:
            raise ValueError(
                f"the chat template writes message {number + 1} in another way when others follow, "
                "so which tokens the assistant says is not known; add {% generation %} marks to "
                "the template, or use data.train_on=all"
            )
        return start, start + length

    def _render(self, messages: Sequence[Message], chat: Chat | None, *, asks: bool = False) -> str:
        """Write messages.

        Raises:
            ValueError: The template refuses them.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*messages],
                tools=None if chat is None else chat.tools,
                tokenize=False,
                add_generation_prompt=asks,
            )
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"the chat template refuses it: {reason}") from None
        if len(text) > LARGEST_ROW:
            raise ValueError(f"the chat template writes {len(text):,} characters for it")
        return text


def _common(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (one, other) in pairs if one != other), shorter)


def _overlapping(offsets: npt.NDArray[np.int64], spans: Sequence[_Span]) -> npt.NDArray[np.uint8]:
    """Return for each token whether one of its characters is in a span."""
    counted = np.zeros(len(offsets), dtype=np.uint8)
    for start, end in spans:
        counted[(offsets[:, 1] > start) & (offsets[:, 0] < end)] = 1
    return counted


def _overlap(added: str, rest: str) -> int:
    """Return the length of the longest end of one text that another begins with."""
    starts = range(len(added))
    return next((len(added) - at for at in starts if rest.startswith(added[at:])), 0)


def _is_written(message: Message, text: str) -> bool:
    """Say whether a message is in the text, as it is or as JSON."""
    line = _last_line(message)
    return line in text or json.dumps(line)[1:-1] in text


def _last_line(message: Message) -> str:
    """Return the end of what a message says, which no template changes."""
    content = message.get("content")
    return content.strip().rpartition("\n")[2].strip() if isinstance(content, str) else ""
