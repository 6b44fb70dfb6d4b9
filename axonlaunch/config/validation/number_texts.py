"""Keeps a number as the user wrote it where text is expected: ``name=1e-3``, ``revision: 1.10``.

YAML and Hydra read these as 0.001 and 1.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axonlaunch.config.schema import RunConfig
from axonlaunch.config.validation.convert_value import EXPECTED_TEXT
from axonlaunch.config.validation.validate import validate


def with_number_texts(
    tree: dict[str, Any], text_of: Callable[[str, float], str | None]
) -> dict[str, Any]:
    """Return a tree with the texts of floats at keys of text.

    Floats without a text stay, and are refused when the tree is typed.

    Args:
        tree: Nested plain values of a whole configuration.
        text_of: Function from a dotted key ``a.b[0].c`` and its float to the text of the user; None
            if that is unknown, as for the result of an interpolation.
    """
    for problem in validate(tree, RunConfig).problems:
        if problem.message.startswith(EXPECTED_TEXT):
            value = _as_written(problem.key, problem.value, text_of)
            tree = _with_value(tree, problem.key, value)
    return tree


def _as_written(key: str, value: Any, text_of: Callable[[str, float], str | None]) -> Any:
    if isinstance(value, list):
        return [_as_written(f"{key}[{n}]", item, text_of) for n, item in enumerate(value)]
    return (text_of(key, value) or value) if isinstance(value, float) else value


def _with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return nested values with another one at a dotted key; unchanged if there is no such key."""
    name, _, rest = key.partition(".")
    if name not in tree:
        return tree
    if not rest:
        return {**tree, name: value}
    below = tree[name]
    return {**tree, name: _with_value(below, rest, value)} if isinstance(below, dict) else tree
