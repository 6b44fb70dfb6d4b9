"""Describes every key of a configuration: its allowed values and the text below its field.

``validate`` checks the values.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from axonlaunch.config.problems.errors import plain
from axonlaunch.config.schema import RunConfig

_TYPES = {
    bool: "true | false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
    Any: "anything",
}
_LIMITS = {"min": "at least", "above": "above", "max": "at most", "below": "below"}


@dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes:
        name: Dotted name.
        value: Value in the described configuration.
        allowed: Allowed values, in words.
        meaning: Description; empty if a user-defined dataclass has none.
    """

    name: str
    value: Any
    allowed: str
    meaning: str


def reference(config: RunConfig) -> list[Key]:
    """Describe every key of a configuration, including the keys of the selected model, data, ..."""
    return [*_keys(config, "")]


def _keys(config: Any, prefix: str) -> Iterator[Key]:
    schema: type = type(config)
    hints, texts = typing.get_type_hints(schema), meanings(schema)
    for spec in dataclasses.fields(schema):
        name, value = f"{prefix}{spec.name}", getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(value, f"{name}.")
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for number, item in enumerate(value):
                yield from _keys(item, f"{name}[{number}].")
        else:
            allowed = _allowed_values(hints[spec.name], spec.metadata)
            yield Key(name, value, allowed, texts.get(spec.name, ""))


def _allowed_values(hint: Any, limits: Mapping[str, Any]) -> str:
    if "allowed" in limits:
        return str(limits["allowed"])
    if "names" in limits:
        is_optional = type(None) in get_args(hint)
        return " | ".join([*limits["names"].names(), *(["null"] if is_optional else [])])
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(_allowed_values(option, limits) for option in inside)
    if origin is Literal:
        return " | ".join(plain(choice) for choice in inside)
    if origin in (list, tuple):
        one = ", or one text" if origin is list and inside[0] is str else ""
        return f"list of {_allowed_values(inside[0], limits)}{one}"
    if origin is dict:
        return f"keys, each with {_allowed_values(inside[1], limits)}"
    allowed = _TYPES.get(hint, "a group of keys")
    if hint in (int, float):
        bounds = [
            f"{word} {plain(limits[limit])}" for limit, word in _LIMITS.items() if limit in limits
        ]
        allowed = ", ".join([allowed, *bounds])
    return allowed


@functools.cache
def meanings(schema: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, by the name of the field."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        try:
            [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (
            OSError,
            TypeError,
            ValueError,
            SyntaxError,
        ):  # no source: created at run time, or built in
            continue
        statements = getattr(body, "body", [])
        for field, text in itertools.pairwise(statements):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                texts[field.target.id] = " ".join(text.value.value.replace("``", "").split())
    return texts
