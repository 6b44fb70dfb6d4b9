"""Reads the messages of a row in the forms in which chats are published.

Supported are OpenAI's ``messages`` (role, content), ShareGPT's ``conversations`` (from, value),
prompt and completion, and Alpaca's instruction, input and output; ``data.fields`` gives other names
of columns and keys. Content that would be lost silently is an error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from axonlaunch.data.files.rows import Row
from axonlaunch.data.texts.chats.computed_fields import computed_from, expressions, with_computed
from axonlaunch.data.texts.chats.message_flags import take_flag
from axonlaunch.data.texts.chats.named_templates import is_jinja

Message = dict[str, Any]

_PAIR, _ALPACA = {"prompt", "completion"}, {"instruction", "input", "output"}
"""Names in ``data.fields`` of the columns of two forms."""
_LISTS = ("messages", "conversations")
"""Usual columns with messages."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles. Other roles are passed to the template unchanged."""
_NAMED_ROLES = ("user", "assistant", "tool")
"""Roles that ``data.fields`` may give other names."""
_OPTIONAL = ("system", "tools")
"""Further columns of rows of every form."""
_OPTIONS = "chat_template_kwargs"
"""Column with values for variables of the chat template, which trl reads too."""
_REFUSED = ("chosen", "rejected", "label")
"""Columns of data for other losses, which are read to be refused."""
_FORMS = "messages, conversations, prompt and completion, or instruction and output"
_KINDS = {"list": "a list", "dict": "an object", "str": "text", "NoneType": "null"}


@dataclass(frozen=True)
class Chat:
    """Input of a chat template.

    Attributes:
        messages: Messages with a role, and content or other keys that the template reads.
        tools: JSON schemas of functions that may be called; None: no tools.
        uncounted: Indices of messages of the assistant that the row excludes from the loss by a
            flag, such as ``training: false``.
        num_prompt_messages: Number of messages at the start that are the prompt, and excluded from
            the loss.
        options: Values of further variables of the chat template, such as ``enable_thinking``.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    uncounted: frozenset[int] = frozenset()
    num_prompt_messages: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def counts(self, number: int) -> bool:
        """Return whether message ``number`` is by the assistant and its tokens enter the loss."""
        is_said = self.messages[number]["role"] == "assistant"
        return is_said and number >= self.num_prompt_messages and number not in self.uncounted


def read_chat(row: Row | str, *, fields: Mapping[str, str]) -> Chat:
    """Return the chat of a row.

    Args:
        row: Row of a file.
        fields: Names of columns and keys by their content (``data.fields``). Columns that it does
            not name are recognized by their usual names.

    Raises:
        ValueError: The row is not a chat; the message describes the row.
    """
    if isinstance(row, str):
        raise ValueError(f"is text; a row of chat is an object with {_column_names(fields)}")
    refuse_other_losses(row, fields)
    row = with_computed(row, fields)
    chat = _messages(row, fields)
    system = _optional(row, "system", fields)
    if system is not None and not isinstance(system, str):
        raise ValueError(f"{fields.get('system', 'system')} is {_kind(system)}, not text")
    if system:
        chat = _with_system(chat, system)
    tools = _tools(_optional(row, "tools", fields))
    chat = replace(chat, tools=tools, options=_options(row.get(_OPTIONS)))
    for number, message in enumerate(chat.messages, start=1):
        for text in (value for value in message.values() if isinstance(value, str)):
            refuse_surrogates(text, f"message {number}")
    return chat


def chat_columns(names: list[str], *, fields: Mapping[str, str]) -> list[str]:
    """Return the columns of a table that chats need; all, if it has none of the forms.

    All are needed if fields are computed from them.

    Args:
        names: Names of the table's columns.
        fields: Names of columns by what they hold.
    """
    if expressions(fields):
        return names
    read = {
        name
        for form in _forms(fields)
        if {*form.needed} <= {*names}
        for name in (*form.needed, *form.optional)
    }
    shared = {*(fields.get(name, name) for name in _OPTIONAL), _OPTIONS, *_REFUSED}
    return [name for name in names if name in read or name in shared] if read else names


def refuse_other_losses(row: Row, fields: Mapping[str, str]) -> None:
    """Refuse rows that are made for a loss of preferences.

    Raises:
        ValueError: The row has two answers to compare, or an answer that is not wanted.
    """
    named = {*fields.values(), *computed_from(fields)}
    if {"chosen", "rejected"} <= row.keys() and not named & {"chosen", "rejected"}:
        raise ValueError(
            "is a pair of preferences (chosen, rejected), whose loss (DPO) is not supported; "
            "data.fields={prompt: prompt, completion: chosen} trains on the chosen answers"
        )
    if row.get("label") is False and "label" not in named:
        raise ValueError(
            "has label: false, an answer that is not wanted (KTO), whose loss is not supported; "
            "leave such rows out"
        )


@dataclass(frozen=True)
class _Form:
    """A form of rows: its columns, and the function that reads a row of it.

    Attributes:
        read: Returns the chat of a row, from its needed columns.
        needed: Columns that every row has.
        optional: Further columns.
    """

    read: Callable[[Row, tuple[str, ...], Mapping[str, str]], Chat]
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


def _forms(fields: Mapping[str, str]) -> list[_Form]:
    """Return the forms that a row may have; only one if ``fields`` names its columns."""
    prompt, completion, instruction, context, output = (
        fields.get(name, name)
        for name in ("prompt", "completion", "instruction", "input", "output")
    )
    pair = _Form(_read_pair, (prompt, completion))
    alpaca = _Form(_read_alpaca, (instruction, output), (context, "history"))
    if "messages" in fields:
        return [_Form(_read_list, (fields["messages"],))]
    if _PAIR & fields.keys():
        return [pair]
    if _ALPACA & fields.keys():
        return [alpaca]
    return [*(_Form(_read_list, (name,)) for name in _LISTS), pair, alpaca]


def _messages(row: Row, fields: Mapping[str, str]) -> Chat:
    """Return the chat of a row: of the first form, such as a list of messages, with all its fields.

    Raises:
        ValueError: The row has no form.
    """
    forms = _forms(fields)
    for form in forms:
        is_null = len(forms) > 1 and form.needed[0] in _LISTS and row.get(form.needed[0]) is None
        if {*form.needed} <= row.keys() and not is_null:
            return form.read(row, form.needed, fields)
    if len(forms) == 1:
        missing = next(name for name in forms[0].needed if name not in row)
        raise ValueError(f"has no field {missing}; it has {fields_of(row)}")
    for name in _LISTS:
        if name in row:
            raise ValueError(f"{name} is null, not a list of messages")
    raise ValueError(
        f"has no {_FORMS}; it has {fields_of(row)}; data.fields={{messages: NAME}} or "
        "{prompt: NAME, completion: NAME} sets other names"
    )


def _read_list(row: Row, columns: tuple[str, ...], fields: Mapping[str, str]) -> Chat:
    """Return the chat of a list of messages, or of texts, in which two speakers take turns."""
    content = row[columns[0]]
    if isinstance(content, list) and content and all(isinstance(text, str) for text in content):
        turns = zip(content, itertools.cycle(("user", "assistant")), strict=False)
        return Chat([{"role": role, "content": text} for text, role in turns])
    messages, uncounted = _parse_list(columns[0], content, fields)
    return Chat(messages, uncounted=uncounted)


def _read_pair(row: Row, columns: tuple[str, ...], fields: Mapping[str, str]) -> Chat:
    """Return a prompt and its completion, each text or messages; only the completion counts."""
    prompt, completion = columns
    questions, _ = _side(row, prompt, "user", fields)
    answered, uncounted = _side(row, completion, "assistant", fields)
    flagged = frozenset(len(questions) + number for number in uncounted)
    return Chat([*questions, *answered], uncounted=flagged, num_prompt_messages=len(questions))


def _side(
    row: Row, name: str, role: str, fields: Mapping[str, str]
) -> tuple[list[Message], frozenset[int]]:
    if isinstance(row[name], list):
        return _parse_list(name, row[name], fields)
    return [{"role": role, "content": text_of(row, name)}], frozenset()


def _read_alpaca(row: Row, columns: tuple[str, ...], fields: Mapping[str, str]) -> Chat:
    instruction, output = columns
    if row.get("history"):
        raise ValueError("has a history, which this form does not support; write messages")
    context = fields.get("input", "input")
    if "input" in fields and context not in row:
        raise ValueError(f"has no field {context}; it has {fields_of(row)}")
    more = "\n\n" + text_of(row, context) if row.get(context) not in (None, "") else ""
    question = {"role": "user", "content": text_of(row, instruction) + more}
    return Chat([question, {"role": "assistant", "content": text_of(row, output)}])


def _with_system(chat: Chat, system: str) -> Chat:
    """Return a chat that begins with a system message.

    Raises:
        ValueError: The chat begins with a different system message.
    """
    message = {"role": "system", "content": system}
    if chat.messages[0]["role"] != "system":
        moved = frozenset(number + 1 for number in chat.uncounted)
        num_prompt = chat.num_prompt_messages + 1 if chat.num_prompt_messages else 0
        return Chat([message, *chat.messages], uncounted=moved, num_prompt_messages=num_prompt)
    if chat.messages[0] != message:
        raise ValueError("has a system field and begins with a system message; leave one out")
    return chat


def _parse_list(
    name: str, content: Any, fields: Mapping[str, str]
) -> tuple[list[Message], frozenset[int]]:
    """Return messages, and the indices of the assistant's that do not count."""
    if not isinstance(content, list):
        raise ValueError(f"{name} is {_kind(content)}, not a list of messages")
    if not content:
        raise ValueError(f"{name} is empty")
    messages, uncounted = [], set()
    for number, each in enumerate(content):
        message, counts = _message(each, f"{name}[{number}]", fields)
        messages.append(message)
        if not counts and message["role"] == "assistant":
            uncounted.add(number)
    return messages, frozenset(uncounted)


def _message(message: Any, position: str, fields: Mapping[str, str]) -> tuple[Message, bool]:
    """Return a message with OpenAI's keys, and whether its flag lets it count."""
    if not isinstance(message, dict):
        raise ValueError(f"{position} is {_kind(message)}, not a message with role and content")
    keys = {key: value for key, value in message.items() if value is not None}
    named = {name: fields.get(name, name) for name in ("role", "content")}
    if named["role"] == "role" not in keys and "from" in keys:
        named["role"] = "from"
        named["content"] = fields.get("content", "value")
    role = keys.pop(named["role"], None)
    if not isinstance(role, str):
        raise ValueError(
            f"{position} has no {fields.get('role', 'role')}; it has {fields_of(message)}"
        )
    text = keys.pop(named["content"], None)
    if "content" in fields and text is None and named["content"] not in message:
        raise ValueError(f"{position} has no {named['content']}; it has {fields_of(message)}")
    roles = {fields[name]: name for name in _NAMED_ROLES if name in fields}
    keys = {
        "role": roles.get(role, _ROLES.get(role, role)),
        **({} if text is None else {"content": text}),
        **keys,
    }
    counts = take_flag(keys, position)
    content = keys.get("content")
    if isinstance(content, list):
        keys["content"] = "".join(_part(part, position) for part in content)
    elif content is None and len(keys) == 1:
        raise ValueError(f"{position} has no content; it has {fields_of(message)}")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{position} has content that is {_kind(content)}, not text")
    return keys, counts


def _part(part: Any, position: str) -> str:
    """Return the text of one part of OpenAI's content, or of LLaMA-Factory's (``value``)."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = None
    if isinstance(part, dict):  # Parquet has null for what a part lacks
        text = part.get("value") if part.get("text") is None else part["text"]
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f"{position} has a part of type {kind}; text models accept only text")
    return text


def _optional(row: Row, name: str, fields: Mapping[str, str]) -> Any:
    if name in fields and fields[name] not in row:
        raise ValueError(f"has no field {fields[name]}; it has {fields_of(row)}")
    return row.get(fields.get(name, name))


def _options(options: Any) -> dict[str, Any]:
    """Return the variables of the template that a row sets, which may be JSON text."""
    if isinstance(options, str) and options.strip():
        try:
            options = json.loads(options)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_OPTIONS} is text that is not JSON: {error}") from None
    if not options:
        return {}
    if not isinstance(options, dict):
        raise ValueError(f"{_OPTIONS} is {_kind(options)}, not an object with variables")
    return {str(name): value for name, value in options.items()}


def _tools(tools: Any) -> list[Any] | None:
    """Return the JSON schemas of functions, which files without nested values hold as text."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tools is text that is not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools is {_kind(tools)}, not a list of JSON schemas")
    return tools


def text_of(row: Row, name: str) -> str:
    """Return the text in a column.

    Raises:
        ValueError: The column's value is not a text.
    """
    if not isinstance(text := row[name], str):
        raise ValueError(f"{name} is {_kind(text)}, not text")
    return text


def refuse_surrogates(text: str, what: str) -> None:
    """Refuse text that can't be encoded.

    Raises:
        ValueError: Half of a surrogate pair is in it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{what} has an unpaired surrogate, which is not a character"
        raise ValueError(message) from None


def fields_of(row: dict[str, Any]) -> str:
    """Return the names of a row's fields for a message."""
    return ", ".join(name for name in map(str, row) if not is_jinja(name)) or "none"


def _column_names(fields: Mapping[str, str]) -> str:
    return ", ".join(fields.values()) or _FORMS


def _kind(value: Any) -> str:
    return _KINDS.get(type(value).__name__, type(value).__name__)
