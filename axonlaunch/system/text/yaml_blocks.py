"""Writes YAML for people: texts of several lines as blocks, and equal values in full."""

from __future__ import annotations

from typing import Any


def to_block_yaml(value: Any) -> str:
    """Write a plain value as YAML, with keys in their order."""
    import yaml

    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    dumper.add_representer(str, _represent_text)  # type: ignore[attr-defined]
    text: str = yaml.dump(value, Dumper=dumper, sort_keys=False, width=100)
    return text


def _represent_text(dumper: Any, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
