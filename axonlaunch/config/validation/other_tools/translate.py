"""Reads another tool's configuration and applies the rules of its tool."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from axonlaunch.config.problems.did_you_mean import unknown
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, in_one_line, one_of
from axonlaunch.config.validation.other_tools.formats import (
    axolotl,
    llamafactory,
    llamafactory_v1,
    torchtune,
    trl,
)
from axonlaunch.config.validation.other_tools.translation import Format, Rule, Translation
from axonlaunch.system.storage.files import read_text, why_not_read

TOOLS: dict[str, Format] = {
    each.name: each
    for each in (
        axolotl.AXOLOTL,
        llamafactory.LLAMA_FACTORY,
        llamafactory_v1.LLAMA_FACTORY_V1,
        torchtune.TORCHTUNE,
        trl.TRL,
    )
}
"""Formats by the name of their tool."""

_LARGEST = 1 << 20
_MOST_VALUES = 100_000
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


def convert_file(path: Path, *, tool: str | None = None, devices: int = 1) -> Translation:
    """Translate a configuration of another tool.

    Args:
        path: YAML or JSON file.
        tool: Name of the tool; None recognizes it by the keys of the file.
        devices: Number of devices that the original runs on.

    Raises:
        ConfigError: The file can't be read, is no mapping, or is of no known tool.
    """
    document = _read(path)
    chosen = _format(path, document, tool)
    if chosen is torchtune.TORCHTUNE:
        document = torchtune.resolve_references(document)
    return translate(document, chosen, devices=devices, folder=path.parent)


def translate(
    document: Mapping[str, Any], tool: Format, *, devices: int = 1, folder: Path
) -> Translation:
    """Translate nested values of another tool.

    Args:
        document: Nested values, without nulls.
        tool: Format of the values.
        devices: Number of devices that the original runs on.
        folder: Folder in which files are looked up that the values name.
    """
    translation = Translation(tool, document, devices, folder)
    for key, value in _leaves(document, tool):
        rule = rule_of(key, tool)
        if rule is None:
            translation.report_unknown(key)
            continue
        if rule.kind == "expressed":
            translation.expressed.append(key)
        rule.apply(translation, key, value)
    tool.finish(translation)
    return translation


def _refuse(path: Path, message: str) -> ConfigError:
    return ConfigError([ConfigIssue("", f"{in_one_line(str(path))}: {message}")])


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, at_most=_LARGEST)
    except OSError as error:
        raise _refuse(path, why_not_read(path, error)) from None
    except UnicodeDecodeError:
        raise _refuse(path, "is not text in UTF-8; write a YAML file") from None
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line_suffix = f" in line {mark.line + 1}" if mark is not None else ""
        raise _refuse(path, f"is not YAML{line_suffix}; write a YAML file") from None
    if not isinstance(document, dict):
        found = "is empty" if document is None else f"contains a {type(document).__name__}"
        raise _refuse(path, f"{found}, not keys with values; write the file of a training run")
    try:
        cleaned = _clean(document, [_MOST_VALUES])
    except (RecursionError, OverflowError):
        reason = f"has more than {_MOST_VALUES:,} values, or contains itself"
        raise _refuse(path, f"{reason}; write the file of a training run") from None
    assert isinstance(cleaned, dict)
    return cleaned


def _clean(value: Any, left: list[int]) -> Any:
    """Return values with names as keys, without nulls, and ``2e-5`` as a number.

    YAML 1.1 reads 2e-5 as text, because it has no dot, and dates as dates.

    Args:
        value: Value of the file.
        left: Number of values that may still follow; references can make them many.

    Raises:
        OverflowError: The file has more values.
    """
    left[0] -= 1
    if left[0] < 0:
        raise OverflowError
    if isinstance(value, dict):
        return {str(key): _clean(each, left) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_clean(each, left) for each in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _format(path: Path, document: Mapping[str, Any], tool: str | None) -> Format:
    if tool is not None and tool not in TOOLS:
        message = unknown("tool", tool, TOOLS)
        raise ConfigError([ConfigIssue("--from", message)])
    tools = TOOLS.values() if tool is None else _versions(tool)
    for each in tools:
        if any(marks <= document.keys() for marks in each.marks):
            return each
    if tool is not None:
        return TOOLS[tool]
    names = one_of([*TOOLS])
    raise _refuse(path, f"has the keys of no known tool; write --from {names}")


def _versions(tool: str) -> list[Format]:
    """Return the formats of a tool: the named one, and those that have its name as a prefix."""
    return [each for name, each in TOOLS.items() if name == tool or name.startswith(f"{tool}-")]


def _leaves(document: Mapping[str, Any], chosen: Format, prefix: str = "") -> Iterator[Any]:
    """Yield each dotted key that has a rule, or no keys below it, and its value."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in chosen.keys:
            yield from _leaves(value, chosen, f"{key}.")
        else:
            yield key, value


def rule_of(key: str, chosen: Format) -> Rule | None:
    """Return the rule of a dotted key; None if the tool has no such key."""
    if key in chosen.keys:
        return chosen.keys[key]
    patterns = [name for name in chosen.keys if "*" in name and fnmatchcase(key, name)]
    return chosen.keys[max(patterns, key=len)] if patterns else None
