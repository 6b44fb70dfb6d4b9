"""Data that is only a shape: what an estimate takes in the place of files.

It knows the datasets that are ours; another one is left as it is, and is read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.config.data import (
    NUM_BYTES,
    DigitsConfig,
    PythonSourceConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
    TextConfig,
    TokensConfig,
)

_NOWHERE: dict[str, dict[str, Any]] = {"tokens": {"path": "-"}, "text": {"files": ["-"]}}
_MISSING = "???"


def naming_files(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a composed tree in which data that was given no files names some."""
    data = tree.get("data")
    if not isinstance(data, dict):
        return tree
    named = {
        key: value
        for key, value in _NOWHERE.get(str(data.get("name")), {}).items()
        if data.get(key) == _MISSING
    }
    return {**tree, "data": {**data, **named}}


def replace_with_synthetic(config: RunConfig) -> RunConfig:
    """Return a configuration whose samples have the same shape and come from no file."""
    data: Any = config.data
    if isinstance(data, PythonSourceConfig | TextConfig):
        shape: Any = SyntheticTokensConfig(
            vocab_size=NUM_BYTES, sequence_length=data.sequence_length
        )
    elif isinstance(data, TokensConfig):
        # Where the data gives no size, any will do: the model's own decides what is allocated.
        size = data.vocab_size or 2
        shape = SyntheticTokensConfig(vocab_size=max(2, size), sequence_length=data.sequence_length)
    elif isinstance(data, DigitsConfig):
        shape = SyntheticImagesConfig(image_size=data.image_size)
    else:
        return config
    return dataclasses.replace(config, data=shape)
