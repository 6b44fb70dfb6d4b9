"""Datasets, a file each, addressed by global sample index, and the registry that lists them.

Importing it, and making a dataset, imports no torch: what can't be read is reported before a rank
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from axonlaunch.config.data import DATASETS
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.tokenizer import TokenizerConfig
from axonlaunch.data.registry import register_dataset

if TYPE_CHECKING:
    from axonlaunch.data.dataset import Dataset
    from axonlaunch.data.encoding import OnProgress

__all__ = ["DATASETS", "build", "register_dataset"]


def build_dataset(
    config: Any,
    tokenizer: TokenizerConfig | None = None,
    *,
    report: OnProgress = lambda state: None,
    verifies: bool = False,
) -> Dataset:
    """Make the dataset that a typed configuration describes.

    Args:
        config: The group ``data``.
        tokenizer: Of text; None: bytes.
        report: Is called now and then while text is tokenised.
        verifies: Whether to compare all tokens of the cache with their checksums now, as a command
            does before it starts ranks; ranks compare what they map.

    Raises:
        UnknownNameError: No dataset of that name is registered.
        ConfigError: It can't be made of what the configuration names.
    """
    problems: list[tuple[str, str]] = getattr(config, "problems", list)()
    if problems:
        raise ConfigError(
            [
                ConfigIssue(f"data.{name}", message, getattr(config, name, ...))
                for name, message in problems
            ]
        )
    build: Callable[..., Dataset] = DATASETS.get(config.name)
    facts = DATASETS.facts(config.name)
    if facts is None or not facts.takes_tokenizer:
        made = build(config)
        return made if DATASETS.is_included(config.name) else _as_dataset(made, config)
    from axonlaunch.data.learned_tokenizer import load_or_learn

    made_by = load_or_learn(tokenizer or TokenizerConfig(), config, report=report)
    return build(config, made_by, report=report, verifies=verifies)


def _as_dataset(made: Any, config: Any) -> Dataset:
    """Return what a registered builder made in the form of a dataset.

    Raises:
        ConfigError: It is none.
    """
    from axonlaunch.data.own import adapt_dataset

    facts = DATASETS.facts(config.name)
    return adapt_dataset(
        made,
        collate=facts.collate if facts else None,
        eval_fraction=getattr(config, "eval_fraction", None),
        num_classes=getattr(config, "num_classes", None),
        refusal=lambda message: ConfigError([ConfigIssue("data.name", message, config.name)]),
    )
