"""Datasets, a file each, addressed by global sample index, and the registry that lists them.

Importing it, and making a dataset, imports no torch: what can't be read is reported before a rank
starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axonlaunch.config.data import DATASETS
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.data.registry import register_dataset

if TYPE_CHECKING:
    from axonlaunch.data.dataset import Dataset

__all__ = ["DATASETS", "build", "register_dataset"]


def build_dataset(config: Any) -> Dataset:
    """Make the dataset that a typed configuration describes.

    Raises:
        UnknownNameError: No dataset of that name is registered.
        ConfigError: It can't be made of what the configuration names.
    """
    problems: list[tuple[str, str]] = getattr(config, "problems", list)()
    if problems:
        raise ConfigError(
            [
                ConfigIssue(f"data.{name}", message, getattr(config, name))
                for name, message in problems
            ]
        )
    dataset: Dataset = DATASETS.get(config.name)(config)
    return dataset
