"""The typed tree as plain values and as YAML, and back.

What is written here can be read back to an equal tree; nothing is resolved or guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


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
    """Write a typed tree as YAML, keys in the schema's order."""
    import yaml

    text: str = yaml.safe_dump(to_tree(config), sort_keys=False)
    return text


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, or a typed tree, to ``{dotted key: leaf}``; lists are leaves."""
    if dataclasses.is_dataclass(tree):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(leaves(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def replaced(tree: T, settings: Mapping[str, Any]) -> T:
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
        values[name] = replaced(getattr(tree, name), below)
    return dataclasses.replace(tree, **values)  # type: ignore[type-var]


def read_yaml(text: str) -> dict[str, Any]:
    """Read what ``to_yaml`` wrote to plain values.

    Raises:
        ValueError: The text is not YAML, or holds no keys.
    """
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError("holds no keys")
    return {str(key): value for key, value in tree.items()}
