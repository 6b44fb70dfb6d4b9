"""Datasets, addressed by global sample index, and their registry.

Neither importing this package nor building a dataset imports torch: unreadable files are reported
before a rank starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from axonlaunch.config.options.data import DATASETS
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, refuse_invalid
from axonlaunch.config.values.optional_keys import eval_fraction, num_classes, num_data_workers
from axonlaunch.data.datasets.registry import register_dataset

if TYPE_CHECKING:
    from axonlaunch.data.datasets.dataset import Dataset
    from axonlaunch.data.shards.encoding import OnProgress

__all__ = ["DATASETS", "build_dataset", "register_dataset"]


def build_dataset(
    config: Any,
    tokenizer: TokenizerConfig | None = None,
    *,
    report: OnProgress = lambda state: None,
    verifies: bool = False,
) -> Dataset:
    """Build the dataset of a typed configuration.

    Args:
        config: The group ``data``.
        tokenizer: Tokenizer for text; None: bytes.
        report: Called from time to time while text is tokenized.
        verifies: Whether to compare all cached tokens with their checksums now, as a command does
            before it starts ranks; ranks compare only the tokens that they map.

    Raises:
        UnknownNameError: No dataset with that name is registered.
        ConfigError: The dataset can't be built from this configuration.
    """
    refuse_invalid("data", config)
    build: Callable[..., Dataset] = DATASETS.get(config.name)
    facts = DATASETS.facts(config.name)
    if facts is None or not facts.takes_tokenizer:
        if DATASETS.is_included(config.name):
            return build(config)
        from axonlaunch.data.reading.random_numbers import kept_generators, seed_generators

        with kept_generators():
            # Every rank builds the same dataset, even if it is shuffled here.
            seed_generators(0)
            built = build(config)
        return _as_dataset(built, config)
    from axonlaunch.data.texts.learned_tokenizer import load_or_learn

    loaded = load_or_learn(tokenizer or TokenizerConfig(), config, report=report)
    return build(config, loaded, report=report, verifies=verifies)


def _as_dataset(built: Any, config: Any) -> Dataset:
    """Adapt the return value of a registered builder.

    Raises:
        ConfigError: The value is not a dataset.
    """
    from axonlaunch.data.datasets.user_datasets.adapters import adapt_dataset

    facts = DATASETS.facts(config.name)
    return adapt_dataset(
        built,
        collate=facts.collate if facts else None,
        eval_fraction=eval_fraction(config),
        num_classes=num_classes(config),
        refusal=lambda message: ConfigError([ConfigIssue("data.name", message, config.name)]),
        description=f"data={config.name}",
        num_workers=num_data_workers(config),
    )
