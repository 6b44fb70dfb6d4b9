"""Computes fields of a row that ``data.fields`` describes by Jinja instead of a column's name.

``{completion: "{{ answers.text[0] }}"}`` reads a value inside a column. Texts run in Jinja's
sandbox and see the columns of the row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.files.rows import Row
from axonlaunch.data.files.tables import LARGEST_ROW
from axonlaunch.data.texts.chats.named_templates import is_jinja


def expressions(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that are computed, with their texts."""
    return {name: text for name, text in fields.items() if is_jinja(text)}


def computed_from(fields: Mapping[str, str]) -> set[str]:
    """Return the names of the columns that computed fields read."""
    from jinja2 import meta

    texts = expressions(fields).values()
    trees = (jinja(text).environment.parse(text) for text in texts)
    return {name for tree in trees for name in meta.find_undeclared_variables(tree)}


def compile_fields(fields: Mapping[str, str]) -> None:
    """Compile the texts of all computed fields.

    Raises:
        ConfigError: A text is not valid Jinja.
    """
    for name, text in expressions(fields).items():
        try:
            jinja(text)
        except Exception as error:  # parsing text of a stranger may raise any error
            issue = ConfigIssue(f"data.fields.{name}", f"does not compile: {error}", text)
            raise ConfigError([issue]) from None


def with_computed(row: Row, fields: Mapping[str, str]) -> Row:
    """Return a row with a column for each computed field; its name is the text of the field.

    Columns that the row already has are not computed again.

    Raises:
        ValueError: A text rejects the row, as when it lacks a column.
    """
    texts = {text: name for name, text in expressions(fields).items() if text not in row}
    if not texts:
        return row
    values = {str(name): value for name, value in row.items() if value is not None}
    return {**row, **{text: _render(text, name, values) for text, name in texts.items()}}


def _render(text: str, name: str, values: Mapping[str, Any]) -> str:
    try:
        rendered = str(jinja(text).render(values))
    except Exception as error:  # a text may raise any error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        shown = ", ".join(map(str, values)) or "no fields"
        raise ValueError(f"data.fields.{name} rejects it: {reason}; it has {shown}") from None
    if len(rendered) > LARGEST_ROW:
        raise ValueError(f"data.fields.{name} writes {len(rendered):,} characters for it")
    return rendered


@functools.lru_cache(maxsize=16)
def jinja(text: str) -> Any:
    """Return a compiled text, which runs in Jinja's sandbox and rejects names that a row lacks."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(text)
