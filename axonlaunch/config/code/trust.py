"""Finds code in a frozen configuration that would be imported when it is loaded.

A configuration that was downloaded with a checkpoint is not trusted: its code is an error until the
user adds ``--trust``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from axonlaunch.config.problems.errors import ConfigIssue
from axonlaunch.config.schema import REGISTRIES
from axonlaunch.config.values.plain_values import line_of


def foreign_code(tree: dict[str, Any], text: str, *, file: str) -> list[ConfigIssue]:
    """Return the code that a configuration would run, each with its line in the file.

    Args:
        tree: Configuration as plain values.
        text: Text that the tree was read from.
        file: Path of the file, for messages.
    """
    return [
        ConfigIssue(
            "",
            f"{file}:{line_of(text, key)}: {ConfigIssue(key, f'would {verb}', value)}; "
            "add --trust if you trust who wrote it",
        )
        for key, value, verb in _named_code(tree)
    ]


def _named_code(tree: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the key, the value, and the action that loading would perform."""
    plugins = tree.get("plugins") or []
    for module in plugins if isinstance(plugins, list) else [plugins]:
        yield "plugins", module, "import it"
    for group, keys in _groups(tree):
        if keys.get("target"):
            yield f"{group}.target", keys["target"], "import and call it"
        if keys.get("trust_remote_code"):
            message = "run code that comes with the model"
            yield f"{group}.trust_remote_code", keys["trust_remote_code"], message
    for key, registry in REGISTRIES.items():
        for path, name in _chosen(tree, key):
            if not registry.is_registered(name):
                for point in registry.offers(name):
                    yield path, name, f"import {point.value}, of an installed package"


def _groups(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each group with its keys, and each item of a list of groups."""
    for group, keys in tree.items():
        items = enumerate(keys) if isinstance(keys, list) else []
        for name, item in [(group, keys), *((f"{group}[{n}]", item) for n, item in items)]:
            if isinstance(item, dict):
                yield name, item


def _chosen(tree: dict[str, Any], key: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a key selects: its value, its ``name``, or those of its items."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    items = enumerate(value) if isinstance(value, list) else []
    for path, item in [(key, value), *((f"{key}[{n}]", item) for n, item in items)]:
        if isinstance(item, str):
            yield path, item
        elif isinstance(item, dict) and isinstance(item.get("name"), str):
            yield f"{path}.name", item["name"]
