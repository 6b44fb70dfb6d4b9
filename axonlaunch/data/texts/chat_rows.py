"""Reads the messages of a row in the forms in which chats are published.

Supported are OpenAI's ``messages`` (role, content), ShareGPT's ``conversations`` (from, value),
prompt and completion, and Alpaca's instruction, input and output. Content that would be lost
silently is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axonlaunch.data.files.rows import Row

Message = dict[str, Any]

_LISTS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles. Other roles are passed to the template unchanged."""
_FORM_FIELDS = (
    *(((name,), ()) for name in _LISTS),
    (("prompt", "completion"), ()),
    (("instruction", "output"), ("input", "history")),
)
"""Required and optional fields of each form."""
_SHARED_FIELDS = ("system", "tools")
"""Additional fields that rows of every form may have."""
_FORMS = "messages, conversations, prompt and completion, or instruction and output"
_KINDS = {"list": "a list", "dict": "an object", "str": "text", "NoneType": "null"}


@dataclass(frozen=True)
class Chat:
    """Input of a chat template.

    Attributes:
        messages: Messages with a role, and content or other keys that the template reads.
        tools: JSON schemas of functions that may be called; None: no tools.
    """

    messages: list[Message]
    tools: list[Any] | None = None


def read_chat(row: Row | str, *, field: str | None) -> Chat:
    """Return the chat of a row.

    Args:
        row: Row of a file.
        field: Name of the field with the messages; None: recognised by its name.

    Raises:
        ValueError: The row is not a chat; the message describes the row.
    """
    if isinstance(row, str):
        raise ValueError(f"is text; a row of chat is an object with {field or _FORMS}")
    messages = _messages(row, field)
    system = row.get("system")
    if isinstance(system, str) and system:
        instruction = {"role": "system", "content": system}
        if messages[0]["role"] != "system":
            messages = [instruction, *messages]
        elif messages[0] != instruction:
            raise ValueError("has a system field and begins with a system message; leave one out")
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools is {_kind(tools)}, not a list of JSON schemas")
    for number, message in enumerate(messages, start=1):
        for text in (value for value in message.values() if isinstance(value, str)):
            _refuse_surrogates(text, number)
    return Chat(messages, tools)


def chat_columns(names: list[str], *, field: str | None) -> list[str]:
    """Return the columns of a table that chats need; all, if it has none of the forms.

    Args:
        names: Names of the table's columns.
        field: Name of the column with the messages; None: recognised by its name.
    """
    forms = _FORM_FIELDS if field is None else (((field,), ()),)
    read = {name for needed, more in forms if {*needed} <= {*names} for name in (*needed, *more)}
    return [name for name in names if name in read or name in _SHARED_FIELDS] if read else names


def _messages(row: Row, field: str | None) -> list[Message]:
    if field is not None:
        if field not in row:
            raise ValueError(f"has no field {field}; it has {_fields(row)}")
        return _parse_list(field, row[field])
    for name in _LISTS:
        if row.get(name) is not None:
            return _parse_list(name, row[name])
    if "prompt" in row and "completion" in row:
        return [
            {"role": "user", "content": _text(row, "prompt")},
            {"role": "assistant", "content": _text(row, "completion")},
        ]
    if "instruction" in row and "output" in row:
        if row.get("history"):
            raise ValueError("has a history, which this form does not support; write messages")
        context = row.get("input")
        more = "\n\n" + _text(row, "input") if context not in (None, "") else ""
        return [
            {"role": "user", "content": _text(row, "instruction") + more},
            {"role": "assistant", "content": _text(row, "output")},
        ]
    for name in _LISTS:
        if name in row:
            raise ValueError(f"{name} is null, not a list of messages")
    raise ValueError(
        f"has no {_FORMS}; it has {_fields(row)}; data.messages_field=NAME sets another name"
    )


def _parse_list(name: str, content: Any) -> list[Message]:
    if not isinstance(content, list):
        raise ValueError(f"{name} is {_kind(content)}, not a list of messages")
    if not content:
        raise ValueError(f"{name} is empty")
    return [_message(message, f"{name}[{number}]") for number, message in enumerate(content)]


def _message(message: Any, where: str) -> Message:
    """Return a message with OpenAI's keys."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_kind(message)}, not a message with role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    if "role" not in fields and {"from", "value"} <= fields.keys():
        role = fields.pop("from")
        fields = {"role": _ROLES.get(role, role), "content": fields.pop("value"), **fields}
    if not isinstance(fields.get("role"), str):
        raise ValueError(f"{where} has no role; it has {_fields(message)}")
    if fields.get("weight", 1) != 1:
        raise ValueError(f"{where} has weight={fields['weight']}; weights of messages are not read")
    fields.pop("weight", None)
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = "".join(_part(part, where) for part in content)
    elif content is None and len(fields) == 1:
        raise ValueError(f"{where} has no content; it has {_fields(message)}")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{where} has content that is {_kind(content)}, not text")
    return fields


def _part(part: Any, where: str) -> str:
    """Return the text of one part of OpenAI's content."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"{where} has a part of type {kind}; text models accept only text")
    return str(part["text"])


def _text(row: Row, name: str) -> str:
    if not isinstance(text := row[name], str):
        raise ValueError(f"{name} is {_kind(text)}, not text")
    return text


def _refuse_surrogates(text: str, number: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"message {number} has an unpaired surrogate, which is not a character"
        raise ValueError(message) from None


def _kind(value: Any) -> str:
    return _KINDS.get(type(value).__name__, type(value).__name__)


def _fields(row: dict[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"
