"""Texts that were made with environment variables, such as ``${oc.env:TOKEN}`` of a logger.

Ranks get the value. Everything that is written, shown or sent to other nodes has the text with the
variable's name instead (``to_interpolations``). Reading it resolves it again
(``resolve_variables``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

_RESOLVER = "oc.env"
_BEGIN = "${" + _RESOLVER + ":"
_MARK = re.compile("\0([^\0]*)\0")
"""Matches the mark of a variable when a configuration is resolved the second time."""
_INTERPOLATION = re.compile(
    r'(?P<escape>\\?)\$\{oc\.env:(?P<name>[^,{}"]+)(?:,(?P<default>"(?:[^"\\]|\\.)*"))?\}'
)
"""Matches an interpolation written by ``to_interpolations``."""


class EnvironmentText(str):
    """A text with the values of environment variables in it.

    Attributes:
        written: The text to write, with ``${oc.env:NAME}`` instead of each value.
    """

    written: str

    def __new__(cls, value: str, written: str) -> EnvironmentText:
        """Create it from its value and from the text to write instead."""
        self = super().__new__(cls, value)
        self.written = written
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return EnvironmentText, (str(self), self.written)

    def below(self, folder: str) -> EnvironmentText:
        """Return this path below a folder."""
        return EnvironmentText(f"{folder}/{self}", f"{folder}/{self.written}")


def to_interpolations(tree: Any) -> Any:
    """Return nested plain values with interpolations instead of environment variables' values.

    Texts that only look like such interpolations are escaped with a backslash.
    """
    return _mapped(tree, lambda text: text.replace(_BEGIN, "\\" + _BEGIN))


def without_environment(tree: Any) -> Any:
    """Return nested plain values as ``to_interpolations`` does, with nothing escaped."""
    return _mapped(tree, lambda text: text)


def _mapped(tree: Any, other: Callable[[str], str]) -> Any:
    if isinstance(tree, EnvironmentText):
        return tree.written
    if isinstance(tree, dict):
        return {key: _mapped(value, other) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(value, other) for value in tree]
    return other(tree) if isinstance(tree, str) else tree


def resolve_variables(tree: Any, environment: Mapping[str, str] | None) -> Any:
    """Reverse ``to_interpolations`` with the values of environment variables.

    Args:
        tree: Plain values of a file or a message.
        environment: The variables; None leaves their names in the texts.

    Raises:
        KeyError: A variable is not set and has no default.
    """
    if isinstance(tree, dict):
        return {key: resolve_variables(value, environment) for key, value in tree.items()}
    if isinstance(tree, list):
        return [resolve_variables(value, environment) for value in tree]
    if not isinstance(tree, str) or _BEGIN not in tree:
        return tree
    value = _INTERPOLATION.sub(partial(_value, environment), tree)
    has_variable = any(not match["escape"] for match in _INTERPOLATION.finditer(tree))
    return EnvironmentText(value, tree) if has_variable else value


def mark_environment(tree: Any, container: Any) -> tuple[Any, list[str]]:
    """Find the texts in a resolved tree that come from the environment.

    Every interpolation is resolved a second time, with marks instead of the variables' values.

    Args:
        tree: Plain values of the container, resolved.
        container: OmegaConf's container.

    Returns:
        The tree with ``EnvironmentText`` for each such text, and the keys of texts that
        ``resolve_variables`` could not make again, because another resolver has changed the value
        of a variable.
    """
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(container, resolve=False)
    if not names_environment(raw):
        return tree, []
    failed: list[str] = []
    with _marking():
        return _mark(tree, raw, container, "", failed), failed


def _mark(value: Any, raw: Any, node: Any, key: str, failed: list[str]) -> Any:
    if isinstance(raw, dict | list) and isinstance(value, dict | list):
        items = raw.items() if isinstance(raw, dict) else enumerate(raw)
        for name, below in items:
            if isinstance(below, dict | list) or (isinstance(below, str) and "${" in below):
                path = f"{key}[{name}]" if isinstance(raw, list) else f"{key}.{name}".lstrip(".")
                value[name] = _mark_item(value[name], below, node, name, path, failed)
    return value


def _mark_item(value: Any, raw: Any, parent: Any, name: Any, key: str, failed: list[str]) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(raw, str):
        return _mark(value, raw, parent[name], key, failed)
    try:
        again = parent[name]
        again = OmegaConf.to_container(again, resolve=True) if OmegaConf.is_config(again) else again
    except OmegaConfBaseException:  # a resolver that does not take marks
        failed += [key] if isinstance(value, str) else []
        return value
    return _compare(value, again, key, failed)


def _compare(value: Any, again: Any, key: str, failed: list[str]) -> Any:
    """Compare both resolutions of a value."""
    if isinstance(value, dict) and isinstance(again, dict):
        pairs = value.items()
        return {k: _compare(v, again.get(k), f"{key}.{k}", failed) for k, v in pairs}
    if isinstance(value, list) and isinstance(again, list) and len(value) == len(again):
        return [
            _compare(*both, f"{key}[{n}]", failed)
            for n, both in enumerate(zip(value, again, strict=True))
        ]
    if not isinstance(value, str) or value == again:
        return value
    escaped = str(again).replace(_BEGIN, "\\" + _BEGIN)
    text = EnvironmentText(value, _MARK.sub(lambda mark: f"{_BEGIN}{mark[1]}}}", escaped))
    if resolve_variables(text.written, os.environ) != value:
        failed.append(key)
    return text


@contextmanager
def _marking() -> Iterator[None]:
    """Have environment variables resolved to marks that name them."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def decode(expr: Any, _parent_: Any, _node_: Any) -> Any:
        is_marked = isinstance(expr, str) and _MARK.search(expr)
        return expr if is_marked else oc.decode(expr, _parent_, _node_)

    def mark(name: str, *default: Any) -> str | None:
        if default == (None,) and name not in os.environ:
            return None
        text = None if default in ((), (None,)) else json.dumps(str(default[0]))
        return f"\0{name}\0" if text is None else f"\0{name},{text}\0"

    OmegaConf.register_new_resolver(_RESOLVER, mark, replace=True)
    OmegaConf.register_new_resolver("oc.decode", decode, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver(_RESOLVER, oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)


def names_environment(tree: Any) -> bool:
    """Return whether texts with environment variables may be among nested values."""
    if isinstance(tree, dict | list):
        return any(map(names_environment, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, str) and _RESOLVER in tree


def _value(environment: Mapping[str, str] | None, match: re.Match[str]) -> str:
    if match["escape"]:
        return match[0][1:]
    if environment is None:
        return match[0]
    name, default = match["name"], match["default"]
    if name in environment:
        return environment[name]
    if default is None:
        raise KeyError(name)
    return str(json.loads(default))
