"""Lists the keys of the configuration with their values, for the completion of settings.

The list is cached, because making it takes a second of imports.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from axonlaunch.system.storage.cache import cache_folder, keep

_PACKAGE = Path(__file__).resolve().parents[2]


def keys_and_values() -> dict[str, list[str]]:
    """Return the values that each dotted key lists, in the syntax of overrides."""
    file, state = cache_folder() / f"completion-{_hash(str(_PACKAGE))[:16]}.json", _hash(_state())
    with suppress(OSError, ValueError, KeyError, TypeError):
        cached = json.loads(file.read_text())
        if cached["state"] == state:
            values: dict[str, list[str]] = cached["values"]
            return values
    from axonlaunch.cli.configuration.config import schema_of_files

    values = dict(_values(schema_of_files(), ""))
    keep(file, json.dumps({"state": state, "values": values}))
    return values


def _state() -> str:
    """Return a text that changes if this package, its YAML or an installed plug-in changes."""
    files = [
        Path(folder, name)
        for root in (_PACKAGE, _PACKAGE.parent / "configs")
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith((".py", ".yaml"))
    ]
    # An installation adds a folder next to the packages, and so changes the time of theirs.
    installed = [
        path for path in map(Path, sys.path) if path.name.endswith("-packages") and path.is_dir()
    ]
    return "\n".join(map(_version, sorted([*files, *installed])))


def _version(path: Path) -> str:
    """Return a text that changes with a file or folder, or if it can no longer be read."""
    try:
        about = path.stat()
    except OSError:
        return str(path)
    return f"{path} {about.st_mtime_ns} {about.st_size}"


def _hash(text: str) -> str:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()


def _values(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each dotted key below a schema with the values that it lists."""
    found: dict[str, list[str]] = {}
    inside: list[tuple[str, dict[str, Any]]] = []
    for name, described in _properties(schema):
        key = f"{prefix}{name}"
        texts = found.setdefault(key, [])
        texts += [text for text in _values_of(described) if text not in texts]
        inside.append((key, described))
    yield from found.items()
    for key, described in inside:
        yield from _values(described, f"{key}.")


def _properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from schema.get("properties", {}).items()
    for each in schema.get("anyOf", []):
        yield from _properties(each)


def _values_of(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the values that a schema lists, in the syntax of overrides."""
    from axonlaunch.config.problems.errors import plain

    yield from (plain(value) for value in schema.get("enum", []))
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for each in schema.get("anyOf", []):
        yield from _values_of(each)
