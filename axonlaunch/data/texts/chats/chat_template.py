"""Renders chats by a tokenizer's chat template, and finds the tokens of the assistant.

If the template has ``{% generation %}`` marks, they define the assistant's tokens. Otherwise a turn
of the assistant is the text that the template adds for it, up to the end of the turn; if that is
ambiguous, the chat is invalid.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, one_of
from axonlaunch.data.files.rows import BadRow
from axonlaunch.data.files.tables import LARGEST_ROW
from axonlaunch.data.texts.chats.chat_rows import Chat, Message
from axonlaunch.data.texts.chats.named_templates import TEMPLATES
from axonlaunch.data.texts.chats.template_date import with_date, writes_date
from axonlaunch.data.tokenizers.tokenizer import PretrainedTokenizer, Tokenizer

_SPOKEN = ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")
"""Keys of a message, other than its content, with text that the assistant writes."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BLAMED = "the chat template, or the tokenizer,"
_Result = TypeVar("_Result")
_Span = tuple[int, int]
Written = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8] | None]
"""A chat's tokens, and whether the assistant says each token; None: all count."""


class ChatTemplate:
    """Renders chats by a tokenizer's template.

    Attributes:
        fingerprint: Hash of the template, and the day that it writes.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, marks_assistant: bool, day: str | None = None
    ) -> None:
        """Find the template.

        Args:
            tokenizer: Tokenizer with the template.
            marks_assistant: Whether to find the tokens of the assistant.
            day: Day in ISO format that a template with a date writes; None: today.

        Raises:
            ConfigError: There is no template, it computes the format of its date, or this tokenizer
                can't locate the assistant's tokens.
        """
        key = "tokenizer.path"
        if not isinstance(tokenizer, PretrainedTokenizer):
            message = (
                "null selects bytes, which have no chat template; use a folder that has "
                "one, or tokenizer=train"
            )
            raise ConfigError([ConfigIssue(key, message)])
        self._pretrained, loaded = tokenizer, tokenizer.transformers
        self.fingerprint, self._day = tokenizer.template_fingerprint, None
        try:
            template = loaded.get_chat_template()
        except ValueError:
            message = (
                "the tokenizer has no chat template; use the one of the model's instruct version, "
                f"or choose data.chat_template={one_of([*TEMPLATES, 'a file or a text'])}"
            )
            raise ConfigError([ConfigIssue(key, message)]) from None
        if marks_assistant and not loaded.is_fast:
            message = (
                "the tokenizer has no tokenizer.json, which is needed to find the assistant's "
                "tokens; use a tokenizer with this file, or data.train_on=all"
            )
            raise ConfigError([ConfigIssue(key, message)])
        named: Any = loaded.chat_template  # one for rows with tools may be among several
        templates = [*named.values()] if isinstance(named, dict) else [template]
        if day is not None and any(map(writes_date, templates)):
            try:
                for each in templates:
                    with_date(each, day)
            except ValueError as error:
                raise ConfigError([ConfigIssue(key, str(error))]) from None
            self.fingerprint, self._day = f"{self.fingerprint} {day}", day
        self._marks_assistant = marks_assistant

    def write(self, chats: Sequence[Chat]) -> list[Written | BadRow]:
        """Return the tokens of each chat, or the reason why the template can't render it.

        Raises:
            IsolatedCallError: The template took too long, or too much memory.
        """
        size = sum(len(str(chat.messages)) for chat in chats)
        options = (self._marks_assistant, self._day)
        return self._call_isolated(_write, options, list(chats), characters=size)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt that asks the assistant to answer messages.

        Raises:
            ValueError: The template rejects the messages.
        """
        return self._call_isolated(_prompt, list(messages), characters=len(str(messages)))

    def end_of_turn(self) -> str:
        """Return the text that the template writes after an answer of the assistant.

        Raises:
            ValueError: The template rejects a question and an answer.
        """
        return self._call_isolated(_end_of_turn, characters=0)

    def _call_isolated(
        self, function: Callable[..., _Result], *args: Any, characters: int
    ) -> _Result:
        return self._pretrained.call_isolated(function, *args, characters=characters, what=_BLAMED)


def _write(
    tokenizer: PretrainedTokenizer, options: tuple[bool, str | None], chats: list[Chat]
) -> list[Written | BadRow]:
    marks_assistant, day = options
    return _Writer(tokenizer.transformers, marks_assistant=marks_assistant, day=day).write(chats)


def _prompt(tokenizer: PretrainedTokenizer, messages: list[Message]) -> list[int]:
    return _Writer(tokenizer.transformers, marks_assistant=False).prompt(messages)


def _end_of_turn(tokenizer: PretrainedTokenizer) -> str:
    return _Writer(tokenizer.transformers, marks_assistant=False).end_of_turn()


class _Writer:
    """Renders chats in this process, with templates and tokenizers that may not be trusted."""

    def __init__(self, tokenizer: Any, *, marks_assistant: bool, day: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._marks_assistant = marks_assistant
        self._day = day
        self._has_marks = bool(_MARKS.search(tokenizer.get_chat_template()))
        self._taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
        self._jinja: Any = importlib.import_module("transformers.utils.chat_template_utils")

    def write(self, chats: Sequence[Chat]) -> list[Written | BadRow]:
        texts = [self._text(chat) for chat in chats]
        pairs = zip(chats, texts, strict=True)
        good = [(chat, text) for chat, text in pairs if not isinstance(text, BadRow)]
        by_marks = self._marks_assistant and self._has_marks
        written = iter(self._mark_tokens(good) if by_marks else self._by_turns(good))
        return [text if isinstance(text, BadRow) else next(written) for text in texts]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        text = self._render(messages, None, is_asked=True)
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def end_of_turn(self) -> str:
        return self._after_answers()[0].strip()

    def _after_answers(self) -> tuple[str, str]:
        """Return the text after each answer, and what follows it only at the end of a chat.

        Phi-3 writes ``<|end|>`` and a line break after each message, and ``<|endoftext|>`` at the
        end. An end that is not after each answer, as in some templates, belongs to the answer.

        Raises:
            ValueError: The template rejects a question and an answer.
        """
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "OK"}
        prompt = self._render([question], None, is_asked=True)
        at_end, before_others = (
            text[_common_prefix(prompt, text) :].partition("OK")[2]
            for text in (
                self._render([question, answer, *others], None) for others in ([], [question])
            )
        )
        length = _common_prefix(at_end, before_others)
        for token in self._tokenizer.get_added_vocab():  # other tokens begin alike: <|user|>
            start = at_end.rfind(token, 0, length + len(token) - 1)
            length = start if 0 <= start < length < start + len(token) else length
        if not at_end[:length].strip():
            return at_end, ""
        return at_end[:length], at_end[length:]

    def _text(self, chat: Chat) -> str | BadRow:
        """Return the rendered text of a chat, or why it is invalid."""
        if taken := sorted(chat.options.keys() & self._taken):
            return BadRow(f"chat_template_kwargs sets {taken[0]}, which a row can't set")
        try:
            text = self._render(chat.messages, chat)
        except ValueError as error:
            return BadRow(str(error))
        lost = next(self._lost_parts(chat, text), None)
        return text if lost is None else BadRow(f"the chat template leaves out {lost}")

    def _lost_parts(self, chat: Chat, text: str) -> Iterator[str]:
        """Yield the parts of a chat that do not affect the rendered text.

        Templates may drop the reasoning of earlier turns, so reasoning is checked as if no turn
        followed.
        """
        without = replace(chat, tools=None)
        if chat.tools is not None and self._writes_alike(chat.messages, without, text):
            yield "tools"
        for number, message in enumerate(chat.messages, start=1):
            previous, following = chat.messages[: number - 1], chat.messages[number:]
            which = f"message {number}, of role {message['role']}"
            is_again = number > 1 and message["role"] == "system"
            if not _is_written(message, text) or (
                is_again and self._writes_alike([*previous, *following], chat, text)
            ):
                yield which
            for key in (key for key in _SPOKEN if message.get(key)):
                shorter = {name: value for name, value in message.items() if name != key}
                try:
                    full_text = self._render([*previous, message], chat)
                except ValueError:  # the template reads a message that it rejects as the last
                    continue
                if self._writes_alike([*previous, shorter], chat, full_text):
                    yield f"{key} of {which}"

    def _writes_alike(self, messages: Sequence[Message], chat: Chat, text: str) -> bool:
        """Return whether messages, with the tools of a chat, are rendered as a given text."""
        try:
            return self._render(messages, chat) == text
        except ValueError:
            return False

    def _mark_tokens(self, chats: Sequence[tuple[Chat, str]]) -> Iterator[Written | BadRow]:
        """Yield tokens by the template's marks, in groups of chats with the same variables."""
        variables = itertools.groupby(chats, lambda each: (each[0].tools, each[0].options))
        for (tools, options), group in variables:
            written = [*group]
            rendered = self._tokenizer.apply_chat_template(
                [chat.messages for chat, _ in written],
                tools=tools,
                chat_template=self._template(tools),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **options,
            )
            tokens, masks = rendered["input_ids"], rendered["assistant_masks"]
            for number, (chat, text) in enumerate(written):
                mask: npt.NDArray[np.uint8] | BadRow = np.array(masks[number], dtype=np.uint8)
                if chat.uncounted or chat.num_prompt_messages:
                    mask = self._some_marks(chat, text)
                if isinstance(mask, BadRow):
                    yield mask
                else:
                    yield np.array(tokens[number], dtype=np.uint32), mask

    def _some_marks(self, chat: Chat, text: str) -> npt.NDArray[np.uint8] | BadRow:
        """Return which tokens are marked, except in messages that do not count."""
        _, [spans] = self._jinja.render_jinja_template(
            [chat.messages],
            tools=chat.tools,
            chat_template=self._template(chat.tools),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **chat.options},
        )
        said = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(spans) != len(said):
            return BadRow(
                f"the chat template marks {len(spans)} parts for {len(said)} messages of the "
                "assistant, so which parts do not count is unknown"
            )
        counted = [span for span, n in zip(spans, said, strict=True) if chat.counts(n)]
        tokens = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return _overlapping(np.array(tokens["offset_mapping"]).reshape(-1, 2), counted)

    def _by_turns(self, chats: Sequence[tuple[Chat, str]]) -> list[Written | BadRow]:
        """Return tokens and, if requested, which of them the assistant's turns add."""
        if not chats:
            return []
        rendered = self._tokenizer(
            [text for _, text in chats],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=self._marks_assistant,
        )
        written: list[Written | BadRow] = []
        for number, (chat, text) in enumerate(chats):
            tokens, mask = np.array(rendered["input_ids"][number], dtype=np.uint32), None
            if self._marks_assistant:
                try:
                    turns = self._turns(chat, text)
                except ValueError as error:
                    written.append(BadRow(str(error)))
                    continue
                mask = _overlapping(
                    np.array(rendered["offset_mapping"][number]).reshape(-1, 2), turns
                )
            written.append((tokens, mask))
        return written

    def _turns(self, chat: Chat, text: str) -> list[_Span]:
        """Return the span of text that each turn of the assistant that counts adds.

        Raises:
            ValueError: A span is ambiguous.
        """
        numbers = range(len(chat.messages))
        return [self._turn(chat, number, text) for number in numbers if chat.counts(number)]

    def _turn(self, chat: Chat, number: int, text: str) -> _Span:
        """Return the span of text that a turn of the assistant adds.

        The span begins after the generation prompt, for example ``<|im_start|>assistant``. It ends
        where a chat that stops with this turn ends, or with the end of the turn, ``<|im_end|>``:
        a line break after it does not count. Some templates drop the reasoning of turns that are
        not the last, so the end of the added text is searched for in the full text.

        Raises:
            ValueError: The texts are inconsistent.
        """
        if not number:
            raise ValueError(
                "begins with the assistant, and the chat template has no {% generation %} marks "
                "for its tokens; put another message before it"
            )
        previous, message = chat.messages[:number], chat.messages[number]
        end, closing = self._ends
        start = _common_prefix(self._render(previous, chat, is_asked=True), text)
        added = self._render([*previous, message], chat)[start:].removesuffix(closing)
        rest = text[start:]
        length = len(added) if rest.startswith(added) else _longest_overlap(added, rest)
        is_after = start >= len(self._render(previous, chat).removesuffix(closing))
        if not is_after or not length or _last_line(message) not in rest[:length]:
            raise ValueError(
                f"the chat template writes message {number + 1} differently when others follow, so "
                "the assistant's tokens are unknown; add {% generation %} marks to the template, "
                "or use data.train_on=all"
            )
        spoken = rest[:length].rstrip()
        if end and spoken.endswith(end):
            length = len(spoken)
        return start, start + length

    @functools.cached_property
    def _ends(self) -> tuple[str, str]:
        """Text that ends a turn of the assistant, and text that ends a chat; may be empty."""
        try:
            end, closing = self._after_answers()
        except ValueError:  # the template rejects a question and an answer
            return "", ""
        return end.strip(), closing

    def _template(self, tools: Any) -> str:
        """Return the template, with the day that it writes; some have another one for tools."""
        template: str = self._tokenizer.get_chat_template(tools=tools)
        return template if self._day is None else with_date(template, self._day)

    def _render(
        self, messages: Sequence[Message], chat: Chat | None, *, is_asked: bool = False
    ) -> str:
        """Render messages.

        Raises:
            ValueError: The template rejects them.
        """
        try:
            tools = None if chat is None else chat.tools
            text: str = self._tokenizer.apply_chat_template(
                [*messages],
                tools=tools,
                chat_template=self._template(tools),
                tokenize=False,
                add_generation_prompt=is_asked,
                **({} if chat is None else chat.options),
            )
        except Exception as error:  # templates may raise any exception
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"the chat template rejects it: {reason}") from None
        if len(text) > LARGEST_ROW:
            raise ValueError(f"the chat template writes {len(text):,} characters for it")
        return text


def _common_prefix(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((position for position, (one, other) in pairs if one != other), shorter)


def _overlapping(offsets: npt.NDArray[np.int64], spans: Sequence[_Span]) -> npt.NDArray[np.uint8]:
    """Return whether each token overlaps a span."""
    counted = np.zeros(len(offsets), dtype=np.uint8)
    for start, end in spans:
        counted[(offsets[:, 1] > start) & (offsets[:, 0] < end)] = 1
    return counted


def _longest_overlap(added: str, rest: str) -> int:
    """Return the length of the longest suffix of one text that is a prefix of another."""
    starts = range(len(added))
    return next((len(added) - at for at in starts if rest.startswith(added[at:])), 0)


def _is_written(message: Message, text: str) -> bool:
    """Return whether a message is in the text, either literally or as JSON."""
    line = _last_line(message)
    return line in text or json.dumps(line)[1:-1] in text


def _last_line(message: Message) -> str:
    """Return the last line of a message's content, which templates do not change."""
    content = message.get("content")
    return content.strip().rpartition("\n")[2].strip() if isinstance(content, str) else ""
