"""The typed tree as plain values and as YAML, and back.

What is written here can be read back to an equal tree; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from axonlaunch.config.environment_values import to_interpolations

_T = TypeVar("_T")

LARGEST_YAML = 1 << 20
"""Bytes, and characters, of a file of YAML."""
DEEPEST_YAML = 64
"""Levels of lists and mappings in each other."""
MOST_YAML = 100_000
"""Values in one file, those that aliases stand for counted again."""


def to_tree(config: Any) -> Any:
    """Return nested dataclasses as nested plain dicts and lists."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_tree(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {key: to_tree(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_tree(value) for value in config]
    return config


def to_yaml(config: Any) -> str:
    """Write a typed tree as YAML, keys in the schema's order.

    Values of environment variables are left out: their texts are written as interpolations.
    """
    import yaml

    text: str = yaml.safe_dump(to_interpolations(to_tree(config)), sort_keys=False)
    return text


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, or a typed tree, to ``{dotted key: leaf}``; lists are leaves."""
    if dataclasses.is_dataclass(tree):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if not isinstance(tree, dict) or not tree:
        return {prefix: to_tree(tree)} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def with_values(tree: _T, settings: Mapping[str, Any]) -> _T:
    """Return a typed tree with values at dotted keys replaced; what they mean is not checked."""
    inside: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if rest:
            inside.setdefault(name, {})[rest] = value
        else:
            values[name] = value
    for name, below in inside.items():
        values[name] = with_values(getattr(tree, name), below)
    return dataclasses.replace(tree, **values)  # type: ignore[type-var]


def read_yaml(text: str) -> dict[str, Any]:
    """Read YAML of plain values, which may be anybody's.

    Raises:
        ValueError: The text is not YAML, holds no keys, or is larger than any configuration is.
    """
    import yaml

    try:
        _refuse_bombs(text)
        tree = yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError("holds no keys")
    return {str(key): value for key, value in tree.items()}


def line_of(text: str, key: str) -> int:
    """Return the line, from 1, in which YAML that was read names a dotted key, ``a.b[0].c``."""
    import yaml

    node = yaml.compose(text, Loader=_loader())
    line = 1
    for part in key.split("."):
        name, _, index = part.rstrip("]").partition("[")
        for known, value in node.value if isinstance(node, yaml.MappingNode) else []:
            if known.value == name:
                node, line = value, known.start_mark.line + 1
                break
        if index and isinstance(node, yaml.SequenceNode):
            node = node.value[int(index)]
            line = node.start_mark.line + 1
    return line


def _refuse_bombs(text: str) -> None:
    """Go through YAML's events, of which none takes memory, before anything is built of them.

    An alias counts as much as what it stands for: nine lists of nine aliases each, every one of
    the list before, are 9^9 values in 200 characters.

    Raises:
        ValueError: It is too large, too deep, or an alias stands for something that holds it.
    """
    import yaml

    if len(text) > LARGEST_YAML:
        raise ValueError(f"is larger than {LARGEST_YAML} characters")
    count = 0
    counts: dict[str, int] = {}  # of anchors that are complete
    begun: list[tuple[str | None, int]] = []
    for event in _events(text):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in begun):
                raise ValueError(f"the alias *{event.anchor} stands for something that holds it")
            count += counts.get(event.anchor, 1)  # one that is not there is an error of YAML's
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, count - 1))
            elif event.anchor is not None:
                counts[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            if anchor is not None:
                counts[anchor] = count - before
        if len(begun) > DEEPEST_YAML:
            raise ValueError(f"is nested deeper than {DEEPEST_YAML} levels")
        if count > MOST_YAML:
            raise ValueError(f"holds more than {MOST_YAML} values, aliases counted in full")


def _events(text: str) -> Iterator[Any]:
    """Yield YAML's events; libyaml, which reads ahead, may find that it is too deep by itself."""
    import yaml

    try:
        yield from yaml.parse(text, Loader=_loader())
    except yaml.YAMLError as error:
        if "exceeded maximum nesting depth" in str(error):
            raise ValueError(f"is nested deeper than {DEEPEST_YAML} levels") from None
        raise


def _loader() -> Any:
    """Return the loader of plain values: the fast one, where PyYAML was built with it."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
