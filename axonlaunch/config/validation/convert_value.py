"""Converts plain values to the types of a schema's fields, without guessing.

A text is never converted to a number, nor a fraction to a whole number. Where texts are listed, one
text is a list of one: ``data.files=train.jsonl``.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from axonlaunch.config.problems.did_you_mean import nearest
from axonlaunch.config.problems.errors import one_of
from axonlaunch.config.values.environment_values import EnvironmentText

EXPECTED_TEXT = "expected text"
"""Begin of the message about a value at a key that takes text, or text and null."""


class Rejected(Exception):  # noqa: N818 - caught by callers that know the key
    """Invalid value; the text names the expected values."""


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to the type of a hint.

    Raises:
        Rejected: The value can't be converted; the text names the expected values.
    """
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(value, get_args(hint))
    if origin is Literal:
        return _literal(value, get_args(hint))
    if origin is list:
        [item_hint] = get_args(hint)
        if item_hint is not str:
            return [convert(item, item_hint) for item in _items(value)]
        if isinstance(value, str):
            return [value] if value else []
        return [convert(item, str) for item in _items(value, "text, or a list")]
    if origin is tuple:
        return _tuple(value, get_args(hint))
    if origin is dict:
        if not isinstance(value, dict):
            raise Rejected("expected keys with values, as in {key: value}")
        return {str(key): convert(item, get_args(hint)[1]) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        raise Rejected("expected a group of keys, as in {key: value}")
    return _scalar(value, hint)


def _scalar(value: Any, hint: Any) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise Rejected("expected true or false")
    if hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            raise Rejected(f"expected a whole number; write {int(value)}")
        raise Rejected("expected a whole number")
    if hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise Rejected("expected a finite number")
            return float(value)
        raise Rejected("expected a number")
    if hint is str:
        if isinstance(value, str | int) and not isinstance(value, bool):
            return value if isinstance(value, str) else str(value)
        raise Rejected(EXPECTED_TEXT)  # also for a float, which may be 1e-3 in the user's words
    raise AssertionError(f"the schema uses a type that validate does not know: {hint}")


def how_to_quote(message: str, key: str, value: Any) -> str:
    """Return the end of a message about a float, or a list with one, where text is expected."""
    items = value if isinstance(value, list) else [value]
    number = next((item for item in items if isinstance(item, float)), None)
    if number is None or not message.startswith(EXPECTED_TEXT):
        return ""
    quoted = f'["{number}"]' if isinstance(value, list) else f'"{number}"'
    return f"; quote a number, as in '{key}={quoted}'"


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    value = str(value) if isinstance(value, EnvironmentText) else value  # frozen with its value
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    close = nearest(str(value), map(str, choices))
    meant = f"did you mean {close}? " if close else ""
    raise Rejected(f"{meant}use {one_of(choices)}")


def _union(value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and type(None) in options:
        return None
    reasons = []
    for option in options:
        if option is type(None):
            reasons.append("null")
            continue
        try:
            return convert(value, option)
        except Rejected as reason:
            reasons.append(str(reason))
            if get_origin(option) is Literal and len(get_args(option)) > 1:
                raise Rejected(f"{reason}; or null") from None
    wanted = [r.removeprefix("expected ").removeprefix("use ") for r in reasons]
    raise Rejected("expected " + " or ".join(wanted))


def _items(value: Any, expected: str = "a list") -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    raise Rejected(f"expected {expected}, as in [a,b]")


def _tuple(value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    items = _items(value)
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(convert(item, hints[0]) for item in items)
    if len(items) != len(hints):
        raise Rejected(f"expected {len(hints)} values, got {len(items)}")
    return tuple(convert(item, hint) for item, hint in zip(items, hints, strict=True))


def check_range(value: Any, limits: Mapping[str, Any], *, or_null: bool) -> None:
    """Check a number, or the numbers in a list, against the limits of a field.

    Args:
        value: Converted value; values that are not numbers are ignored.
        limits: Metadata of the field: ``min`` and ``max``, and the exclusive ``above`` and
            ``below``.
        or_null: Whether the message also suggests null.

    Raises:
        Rejected: A number is outside a limit; the text names the limit.
    """
    tail = ", or null" if or_null else ""
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if "min" in limits and number < limits["min"]:
            raise Rejected(f"must be at least {limits['min']}{tail}")
        if "above" in limits and number <= limits["above"]:
            raise Rejected(f"must be above {limits['above']}{tail}")
        if "max" in limits and number > limits["max"]:
            raise Rejected(f"must be at most {limits['max']}{tail}")
        if "below" in limits and number >= limits["below"]:
            raise Rejected(f"must be below {limits['below']}{tail}")
