"""Translates single keys of other tools, for messages about unknown keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from axonlaunch.config.problems.errors import plain
from axonlaunch.config.validation.other_tools.formats.trl import TRL
from axonlaunch.config.validation.other_tools.translate import TOOLS, rule_of, translate
from axonlaunch.config.validation.other_tools.translation import Format, Setting, Translation

_TOOLS = sorted(TOOLS.values(), key=lambda tool: tool is not TRL)
"""All tools; trl's keys, most of which are those of transformers' Trainer, come first."""
_BATCH = "train.global_batch_size"
_OF_THE_STEP = f"{_BATCH}=SAMPLES, those of one step on all devices"
"""Other tools count samples of a device, so that no single key has the number."""


def counterpart_of(key: str, value: Any, *, in_patterns: bool = True) -> str | None:
    """Return what to write for a setting of another tool; None if no tool has the key.

    ``counterpart_of("learning_rate", 2e-5)`` is ``"write optimizer.lr=2e-05"``. A tool that has a
    counterpart is preferred, then one that says what is missing.

    Args:
        key: Dotted key of the other tool.
        value: Value that the user wrote.
        in_patterns: Whether a pattern that matches the key counts, as ``wandb_*``.
    """
    tools = [
        tool
        for tool in _TOOLS
        if key in tool.keys or (in_patterns and rule_of(key, tool) is not None)
    ]
    translations = [each for tool in tools for each in _translations(tool, key, value)]
    remarks = [[r.text for r in each.remarks if r.key == key] for each in translations]
    for translation, texts in zip(translations, remarks, strict=True):
        if settings := _settings(translation, key):
            return "; ".join([f"write {_as_overrides(settings)}", *texts])
    for texts in remarks:
        if texts:
            return texts[0]
    reasons = [rule.reason for tool in tools if (rule := rule_of(key, tool)) and rule.reason]
    return f"remove it: {reasons[0]}" if reasons else None


def _translations(tool: Format, key: str, value: Any) -> Iterator[Translation]:
    """Yield the translation of one key without and with the keys that it may depend on."""
    parts = key.split(".")
    setting: dict[str, Any] = {parts[-1]: value}
    for name in reversed(parts[:-1]):
        setting = {name: setting}
    yield translate(setting, tool, folder=Path())
    yield translate(_merged(tool.companions, setting), tool, folder=Path())


def _merged(companions: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    both = {**companions, **setting}
    for name in companions.keys() & setting.keys():
        if isinstance(companions[name], Mapping) and isinstance(setting[name], Mapping):
            both[name] = _merged(companions[name], setting[name])
    return both


def _settings(translation: Translation, key: str) -> dict[str, Setting]:
    """Return the settings that a key determines; ``auto`` only if there are no others."""
    every = {**translation.options, **translation.settings}
    of_key = {name: setting for name, setting in every.items() if key in setting.keys}
    chosen = {name: setting for name, setting in of_key.items() if setting.value != "auto"}
    return chosen or of_key


def _as_overrides(settings: Mapping[str, Setting]) -> str:
    exact = [
        quote(f"{name}={plain(each.value)}") for name, each in settings.items() if name != _BATCH
    ]
    if _BATCH not in settings:
        return " ".join(exact)
    return " and ".join([*exact, _OF_THE_STEP])
