"""Converts the typed tree to plain values and YAML, and reads YAML.

Written YAML can be read back to an equal tree.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from axonlaunch.config.values.environment_values import to_interpolations

if TYPE_CHECKING:
    import yaml

_T = TypeVar("_T")

LARGEST_YAML = 1 << 20
"""Largest size of a YAML file, in bytes and in characters."""
DEEPEST_YAML = 64
"""Largest nesting depth of lists and mappings."""
MOST_YAML = 100_000
"""Largest number of values in a file, with aliases expanded."""
_FLOAT = "tag:yaml.org,2002:float"
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][\d_]*|0b[01_]+|0x[\da-fA-F_]+)$"),
    _FLOAT: re.compile(
        r"[-+]?(?:(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
        r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
    ),
}
"""Texts that are numbers. YAML 1.1 takes 1e-3 for text, 12:00:00 for 43,200, and 010 for 8."""
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"
"""Tag of ``<<``, which a mapping may have several times."""


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
    """Write a typed tree as YAML, with keys in the order of the schema.

    Values of environment variables are written as interpolations.
    """
    import yaml

    tree = to_interpolations(to_tree(config))
    text: str = yaml.dump(tree, Dumper=_dumper(), sort_keys=False)
    return text


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings or a typed tree to ``{dotted key: leaf}``; lists are leaves."""
    if dataclasses.is_dataclass(tree):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if not isinstance(tree, dict) or not tree:
        return {prefix: to_tree(tree)} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def with_values(tree: _T, settings: Mapping[str, Any]) -> _T:
    """Return a typed tree with values at dotted keys replaced; the values are not checked."""
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


def _why_not_yaml(error: yaml.MarkedYAMLError, text: str) -> str:
    """Return the line of an error and its reason."""
    if (mark := error.problem_mark) is None:
        return " ".join(str(error).split())
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"line {mark.line + 1} is indented with a tab; use spaces"
    reason = " ".join(f"{error.context or ''} {error.problem}".split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}"


def read_yaml(text: str, *, is_frozen: bool = False) -> dict[str, Any]:
    """Read YAML of plain values as Hydra does; the text need not be trusted.

    Args:
        text: Text of the file.
        is_frozen: Whether ``to_yaml`` of this or an earlier version wrote the text. It quotes what
            YAML 1.1 reads as numbers, so 1e-3 without quotes is the text of an earlier version.

    Raises:
        ValueError: The text is not YAML, has no keys or the same key twice, or is larger than any
            configuration.
    """
    import yaml

    try:
        _refuse_bombs(text)
        loader = (_safe_loader() if is_frozen else _loader())(text)
        root = loader.get_single_node()
        _refuse_repeated_keys(root)
        tree = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"not YAML: {_why_not_yaml(error, text)}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError("holds no keys")
    return {str(key): value for key, value in tree.items()}


def line_of(text: str, key: str) -> int:
    """Return the line number, from 1, of a dotted key ``a.b[0].c`` in valid YAML."""
    import yaml

    node = yaml.compose(text, Loader=_loader())
    line = 1
    for part in key.split("."):
        name, _, index = part.rstrip("]").partition("[")
        for key_node, value in node.value if isinstance(node, yaml.MappingNode) else []:
            if key_node.value == name:
                node, line = value, key_node.start_mark.line + 1
                break
        if index and isinstance(node, yaml.SequenceNode):
            node = node.value[int(index)]
            line = node.start_mark.line + 1
    return line


def number_text(text: str, key: str) -> str | None:
    """Return how valid YAML writes the float at a dotted key ``a.b[0].c``; None for no float."""
    import yaml

    node = yaml.compose(text, Loader=_loader())
    for name in re.findall(r"[^.\[\]]+", key):
        if isinstance(node, yaml.MappingNode):
            node = next((value for each, value in node.value if each.value == name), None)
        elif isinstance(node, yaml.SequenceNode) and name.isdecimal():
            node = node.value[int(name)]
        else:
            return None
    is_float = isinstance(node, yaml.ScalarNode) and node.tag == _FLOAT
    return str(node.value) if is_float else None


def _refuse_bombs(text: str) -> None:
    """Check the events of a YAML text, which need little memory, before values are built.

    An alias counts with all its values: nine lists, each with nine aliases of the
    previous list, are 9^9 values in 200 characters.

    Raises:
        ValueError: The text is too large or too deep, or an alias contains itself.
    """
    import yaml

    if len(text) > LARGEST_YAML:
        raise ValueError(f"is larger than {LARGEST_YAML} characters")
    count = 0
    counts: dict[str, int] = {}  # by complete anchor
    begun: list[tuple[str | None, int]] = []
    for event in _events(text):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in begun):
                raise ValueError(f"the alias *{event.anchor} stands for something that holds it")
            count += counts.get(event.anchor, 1)  # YAML reports a missing anchor
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, count - 1))
            elif event.anchor is not None:
                counts[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, count_before = begun.pop()
            if anchor is not None:
                counts[anchor] = count - count_before
        if len(begun) > DEEPEST_YAML:
            raise ValueError(f"is nested deeper than {DEEPEST_YAML} levels")
        if count > MOST_YAML:
            raise ValueError(f"holds more than {MOST_YAML} values, aliases counted in full")


def _refuse_repeated_keys(root: Any) -> None:
    """Refuse a mapping with the same key twice, of which YAML would silently drop the first.

    Args:
        root: Composed node of a document, or None for an empty one.

    Raises:
        ValueError: A key is repeated.
    """
    import yaml

    nodes, visited = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in visited or not isinstance(node, yaml.CollectionNode):
            continue
        visited.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            nodes += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            nodes.append(value)
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ValueError(
                    f"has the key {key.value} twice, in lines {lines[key.value]} and {line}; write "
                    "both values below one"
                )
            lines[key.value] = line


def _events(text: str) -> Iterator[Any]:
    """Yield YAML events; libyaml, which reads ahead, may report the nesting depth first."""
    import yaml

    try:
        yield from yaml.parse(text, Loader=_loader())
    except yaml.YAMLError as error:
        if "exceeded maximum nesting depth" in str(error):
            raise ValueError(f"is nested deeper than {DEEPEST_YAML} levels") from None
        raise


def _safe_loader() -> Any:
    """Return a loader of YAML 1.1; the fast one if PyYAML was built with it."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def _loader() -> Any:
    """Return a loader of plain values.

    It reads 1e-3 as a number, like Hydra's, and 2026-11-29, 12:00:00 and 010 as text.
    """
    import yaml

    class Loader(_safe_loader()):  # type: ignore[misc]
        yaml_implicit_resolvers = {
            first: [each for each in resolvers if each[0] not in {*_NUMBERS, _TIMESTAMP}]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    for tag, pattern in _NUMBERS.items():
        Loader.add_implicit_resolver(tag, pattern, [*"-+.0123456789"])
    return Loader


@cache
def _dumper() -> Any:
    """Return a writer that quotes texts that YAML 1.1, Hydra or this module read as numbers."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    for tag, pattern in _NUMBERS.items():
        Dumper.add_implicit_resolver(tag, pattern, [*"-+.0123456789"])
    return Dumper
