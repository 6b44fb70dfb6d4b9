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
from axonlaunch.system.processes.isolated import Isolated, IsolatedCallError

_COMPILE_SECONDS = 20.0


def expressions(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that are computed, with their texts."""
    return {name: text for name, text in fields.items() if is_jinja(text)}


def computed_from(fields: Mapping[str, str]) -> set[str]:
    """Return the names of the columns that computed fields read."""
    from jinja2 import nodes

    trees = map(_environment().parse, expressions(fields).values())
    return {node.name for tree in trees for node in tree.find_all(nodes.Name)}


def compile_fields(fields: Mapping[str, str]) -> None:
    """Compile the texts of all computed fields.

    Raises:
        ConfigError: A text is not valid Jinja.
    """
    for name, text in expressions(fields).items():
        try:
            check_jinja(text)
        except ValueError as error:
            issue = ConfigIssue(f"data.fields.{name}", f"does not compile: {error}", text)
            raise ConfigError([issue]) from None


@functools.lru_cache(maxsize=16)
def check_jinja(text: str) -> None:
    """Compile a text in a copy of this process, because Jinja computes constants: ``9**9**9``.

    Raises:
        ValueError: The text is not valid Jinja, or takes too long or too much memory.
    """
    copy = Isolated(None)
    try:
        problem = copy.call(_compile_problem, text, seconds=_COMPILE_SECONDS)
    except IsolatedCallError as error:
        problem = str(error)
    finally:
        copy.end()
    if problem is not None:
        raise ValueError(problem)


def _compile_problem(_: None, text: str) -> str | None:
    try:
        jinja(text)
    except Exception as error:  # parsing text of a stranger may raise any error
        line = getattr(error, "lineno", None)
        return f"line {line}: {error}" if line is not None else str(error)
    return None


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
    """Return a compiled text, which runs in Jinja's sandbox and rejects names that a row lacks.

    Call it only in a copy of this process.
    """
    return _environment().from_string(text)


@functools.cache
def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
