"""Replaces a run's dataset by synthetic data of the same shape, so estimates need no files.

The registry knows the shape of a dataset's samples. Datasets without a registered shape are kept.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.config.options.data import (
    DATASETS,
    ShapeOnlyTokensConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
)
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.registry import EntryPointError
from axonlaunch.config.schema import TrainConfig
from axonlaunch.config.values.optional_keys import packing_of

_MISSING = "???"


def with_file_placeholders(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a composed tree with placeholders for the data files that the user did not set."""
    data = tree.get("data")
    name = str(data.get("name")) if isinstance(data, dict) else ""
    if not isinstance(data, dict) or name not in DATASETS:
        return tree
    try:
        entry = DATASETS.entry(name)
    except EntryPointError:
        return tree  # typing the tree reports it
    files = entry.facts.files if entry.facts else ()
    hints = typing.get_type_hints(entry.config) if files else {}
    named = {
        key: ["-"] if typing.get_origin(hints[key]) is list else "-"
        for key in files
        if data.get(key, _MISSING) == _MISSING
    }
    return {**tree, "data": {**data, **named}}


def replace_with_synthetic(config: RunConfig) -> RunConfig:
    """Return a configuration with synthetic samples of the same shape."""
    if config.train.steps == "auto":  # synthetic data has no epochs
        train = dataclasses.replace(config.train, steps=TrainConfig.steps, epochs=None)
        config = dataclasses.replace(config, train=train)
    if isinstance(config.data, SyntheticTokensConfig | SyntheticImagesConfig):
        return config
    facts = DATASETS.facts(config.data.name)
    if facts is None or facts.sample is None:
        return config
    sample = facts.sample(config.data)
    # If only the files determine it, any number does: allocations depend on the model's.
    num_classes = max(2, sample.num_classes or 2)
    if sample.kind == "tokens":
        (length,) = sample.shape
        data: Any = SyntheticTokensConfig(vocab_size=num_classes, sequence_length=length)
        if sample.is_packed:
            data = ShapeOnlyTokensConfig(
                vocab_size=num_classes,
                sequence_length=length,
                document_length=length,
                packing=packing_of(config.data),
            )
    else:
        channels, height, width = sample.shape
        if height != width:
            return config  # synthetic images are square
        data = SyntheticImagesConfig(
            num_channels=channels, image_size=height, num_classes=num_classes
        )
    # Added tokens grow the model, also without data.
    tokenizer = config.tokenizer if config.tokenizer.new_tokens() else TokenizerConfig()
    return dataclasses.replace(config, data=data, tokenizer=tokenizer)
