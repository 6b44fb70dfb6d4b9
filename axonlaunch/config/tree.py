"""The typed tree as plain values and as YAML, and back.

What is written here can be read back to an equal tree; nothing is resolved or guessed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


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


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a typed tree to ``{dotted key: value}``; lists are values."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found.update(leaves(value, f"{key}."))
        elif isinstance(value, dict) and value:
            found.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            found[key] = value
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Read what ``to_yaml`` wrote to plain values.

    Raises:
        ValueError: The file is not YAML, or holds no keys.
    """
    import yaml

    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError("holds no keys")
    return {str(key): value for key, value in tree.items()}
