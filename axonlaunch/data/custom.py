"""A user's own dataset, named by where it is imported from; what it may be is ``own``'s to say."""

from __future__ import annotations

from axonlaunch.config.data import CustomDataConfig
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.plugins import import_callable
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.own import adapt_dataset


def build_custom_dataset(config: CustomDataConfig) -> Dataset:
    """Import ``target`` and call it with the arguments.

    Raises:
        ConfigError: It can't be imported, can't be called, or returns no dataset.
    """
    builder = import_callable("data.target", config.target, config.arguments)
    collate = None
    if config.collate is not None:
        collate = import_callable("data.collate", config.collate)
    return adapt_dataset(
        builder(**config.arguments),
        collate=collate,
        eval_fraction=config.eval_fraction,
        num_classes=config.num_classes,
        refusal=lambda message: ConfigError([ConfigIssue("data.target", message, config.target)]),
    )
