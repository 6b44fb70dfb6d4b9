"""Builds ``data=custom``: a user-defined dataset that is imported by its ``data.target``."""

from __future__ import annotations

from axonlaunch.config.code.plugins import import_callable
from axonlaunch.config.options.data import CustomDataConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.datasets.user_datasets.adapters import adapt_dataset
from axonlaunch.data.reading.random_numbers import kept_generators, seed_generators


def build_custom_dataset(config: CustomDataConfig) -> Dataset:
    """Import ``target`` and call it with the arguments.

    Raises:
        ConfigError: The target can't be imported or called, or does not return a dataset.
    """
    builder = import_callable("data.target", config.target, config.arguments)
    collate = None
    if config.collate is not None:
        collate = import_callable("data.collate", config.collate)
    with kept_generators():
        # Every rank builds the same dataset, even if it is shuffled here.
        seed_generators(0)
        dataset = builder(**config.arguments)
    return adapt_dataset(
        dataset,
        collate=collate,
        eval_fraction=config.eval_fraction,
        num_classes=config.num_classes,
        refusal=lambda message: ConfigError([ConfigIssue("data.target", message, config.target)]),
        description=f"data=custom ({config.target})",
        num_workers=config.workers,
    )
