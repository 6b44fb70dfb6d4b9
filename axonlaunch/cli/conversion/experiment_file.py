"""Writes an experiment in YAML, with the origin of each value as a comment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from axonlaunch.config.validation.other_tools.translation import Setting, Translation

_ORDER = ("model", "adapter", "data", "tokenizer", "optimizer", "scheduler", "train", "checkpoint")


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts with line breaks in quotes, so that a value stays in one line."""


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\n" in text else None)


_Dumper.add_representer(str, _write_text)


def experiment_yaml(translation: Translation, file_name: str) -> str:
    """Return the YAML of a translation as an option of the group ``experiment``.

    Args:
        file_name: Name of the translated file, for the first comment.
    """
    lines = ["# @package _global_", f"# {ascii(file_name)[1:-1]} of {translation.tool.name}"]
    if translation.options:
        lines.append("defaults:")
    for group, setting in translation.options.items():
        lines.append(f"  - override /{group}: {setting.value}{_comment(setting.origin)}")
    tree: dict[str, Any] = {}
    for key, setting in translation.settings.items():
        *groups, last = key.split(".")
        node = tree
        for name in groups:
            node = node.setdefault(name, {})
        node[last] = setting
    top = [name for name, node in tree.items() if isinstance(node, Setting)]
    ordered = [*top, *(name for name in _ORDER if name in tree)]
    ordered += [name for name in tree if name not in ordered]
    for name in ordered:
        if name not in top or name == top[0]:
            lines.append("")
        lines += _lines(name, tree[name], 0)
    return "\n".join(lines) + "\n"


def _lines(name: str, node: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, Setting):
        yield f"{indent}{name}: {_value(node.value)}{_comment(node.origin)}"
        return
    yield f"{indent}{name}:"
    for inner, value in node.items():
        yield from _lines(inner, value, depth + 1)


def _value(value: Any) -> str:
    """Return a value in one line of YAML; ``${`` is escaped, because it would be resolved."""
    text: str = yaml.dump(
        _escape(value), Dumper=_Dumper, default_flow_style=True, width=float("inf"), sort_keys=False
    )
    return text.removesuffix("...\n").strip()


def _escape(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, list):
        return [_escape(each) for each in value]
    if isinstance(value, dict):
        return {_escape(key): _escape(each) for key, each in value.items()}
    return value


def _comment(origin: str) -> str:
    return f"  # {origin}"
