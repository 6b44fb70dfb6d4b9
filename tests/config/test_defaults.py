"""Each default of a key is defined only in its dataclass: an option's YAML repeats none."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from axonlaunch import config
from axonlaunch.config.composition.compose import packaged_configs
from axonlaunch.config.options.adapter import LoraConfig
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.schema import GROUPS, StrategyConfig, TrainConfig
from axonlaunch.config.validation.validate import validate

SCHEMAS = {
    "adapter": LoraConfig,
    "hardware": HardwareConfig,
    "strategy": StrategyConfig,
    "tokenizer": TokenizerConfig,
}
ENTRIES = {
    (group, name): kind
    for group, registry in GROUPS.items()
    if registry is not None
    for name, kind in registry.configs().items()
}
FALLBACK = re.compile(r"\$\{oc\.select:model\.preset\.\w+,(\w+)\}")
"""Values that a model's preset replaces; without a preset the text after the comma applies."""


def tree_of(file: Path) -> dict[str, Any]:
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items() if key != "preset" and value != "???"}


def settings_and_defaults(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the typed values that an option sets, and the defaults of the same keys."""
    tree = tree_of(file)
    schema = SCHEMAS.get(file.parent.name) or ENTRIES[file.parent.name, tree["name"]]
    needed: dict[str, Any] = {
        spec.name: None
        for spec in fields(schema)
        if spec.default is spec.default_factory is MISSING
    }
    typed = config.flatten(config.to_tree(validate(tree, schema).config))
    defaults = config.flatten(config.to_tree(schema(**needed)))
    keys = [key for key, value in config.flatten(tree).items() if "${" not in str(value)]
    return {key: typed[key] for key in keys}, {key: defaults.get(key, MISSING) for key in keys}


FILES = [
    file
    for file in sorted(packaged_configs().glob("*/*.yaml"))
    if file.parent.name != "experiment" and file.stem != "auto"
]


@pytest.mark.parametrize("group", sorted({file.parent.name for file in FILES}))
def test_the_yaml_of_an_option_repeats_no_default(group: str) -> None:
    repeated = []
    for file in [file for file in FILES if file.parent.name == group]:
        settings, defaults = settings_and_defaults(file)
        repeated += [
            f"{group}/{file.name}: {key}={value}"
            for key, value in settings.items()
            if value == defaults[key]
            and key != "name"
            # An unpublished figure of a device is written as null, with the reason.
            and (group != "hardware" or value is not None)
        ]
    assert repeated == []


@pytest.mark.parametrize("group", sorted({group for group, _ in ENTRIES}))
def test_the_yaml_of_an_included_option_contradicts_no_default(group: str) -> None:
    """``optimizer=lion`` and ``LionConfig()`` have the same values."""
    files = [file for file in FILES if (file.parent.name, file.stem) in ENTRIES]
    changed = [
        f"{group}/{file.name}: {key}={value}"
        for file in files
        if file.parent.name == group
        for key, value in settings_and_defaults(file)[0].items()
        if key != "name"
    ]
    assert changed == []


def test_without_a_preset_of_the_model_a_value_is_the_default_of_the_dataset() -> None:
    for file in FILES:
        if (file.parent.name, file.stem) in ENTRIES:
            of_option = ENTRIES[file.parent.name, file.stem]
            assert_fallbacks_equal(of_option, config.flatten(tree_of(file)), name=file.stem)


def assert_fallbacks_equal(schema: Any, settings: dict[str, Any], *, name: str) -> None:
    for key, value in settings.items():
        if (match := FALLBACK.fullmatch(str(value))) is not None:
            assert match[1] == str(getattr(schema, key)), f"{name}: {key}"


def test_primary_file_repeats_and_contradicts_no_default() -> None:
    tree = tree_of(packaged_configs() / "config.yaml")
    assert tree.keys() == {"defaults", "train"}
    assert_fallbacks_equal(TrainConfig, tree["train"], name="config.yaml")
    assert all(FALLBACK.fullmatch(str(value)) for value in tree["train"].values())
