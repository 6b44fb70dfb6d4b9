"""Registries of metrics and callbacks, which the training loop calls.

``models.specs.metrics`` and ``training.callbacks`` implement them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axonlaunch.config.problems.errors import target_problems
from axonlaunch.config.registry import Entry, RegisteredConfig, Registry


@dataclass(frozen=True)
class MetricFacts:
    """Properties of a metric that its registration declares, known before its code is imported.

    Attributes:
        num_sums: Number of sums that the metric returns for a micro-batch.
        higher_is_better: Whether a higher value is better.
    """

    num_sums: int = 2
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True)
class AccuracyConfig:
    """Fraction of counted targets whose class has the highest output."""

    name: str = "accuracy"
    """name of the metric"""


@dataclass(frozen=True, kw_only=True)
class CustomMetricConfig(RegisteredConfig):
    """User-defined metric, named by its import path; its name is that of the function."""

    name: str = "custom"
    """name of the metric"""
    target: str
    """import path of the function, package.module:function; it is called with the outputs, the
    batch and the arguments, and returns a tensor of two sums: the metric is the first divided by
    the second
    """
    higher_is_better: bool = True
    """whether a higher value is better"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        return target_problems(self.target, "function")


@dataclass(frozen=True, kw_only=True)
class CustomCallbackConfig(RegisteredConfig):
    """User-defined callback, named by its import path."""

    name: str = "custom"
    """name of the callback"""
    target: str
    """import path of the class, package.module:Class; it is called with the arguments"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        return target_problems(self.target, "Class")


EVALUATION_METRICS: Registry[Any, MetricFacts] = Registry(
    "metric",
    {
        "accuracy": Entry(
            "axonlaunch.models.specs.metrics:make_accuracy",
            "fraction of counted targets whose class has the highest output",
            AccuracyConfig,
            MetricFacts(),
        ),
        "custom": Entry(
            "axonlaunch.models.specs.metrics:make_custom_metric",
            "your function, target and arguments",
            CustomMetricConfig,
            MetricFacts(),
        ),
    },
    entry_points="axonlaunch.metrics",
)
"""Metrics by name; each target creates a ``Metric`` (``models.specs``) from its configuration."""

CALLBACKS: Registry[Any, None] = Registry(
    "callback",
    {
        "custom": Entry(
            "axonlaunch.training.callbacks:make_custom_callback",
            "your callback, target and arguments",
            CustomCallbackConfig,
        )
    },
    entry_points="axonlaunch.callbacks",
)
"""Callbacks by name; each target creates a ``Callback`` from its configuration."""


def metric_name(config: Any) -> str:
    """Return the name under which a metric is reported."""
    if isinstance(config, CustomMetricConfig):
        return config.target.rpartition(":")[2].rpartition(".")[2]
    return str(config.name)


def is_best_highest(metrics: Sequence[Any], best: str) -> bool:
    """Return whether the best value of ``train.best_metric`` is the highest one.

    Args:
        metrics: Configured metrics. An empty list stands for ``accuracy``, which classifiers get.
        best: Value of ``train.best_metric``; ``loss`` is best if it is lowest.
    """
    listed = metrics or [AccuracyConfig()]
    return any(is_higher_better(metric) for metric in listed if metric_name(metric) == best)


def is_higher_better(config: Any) -> bool:
    """Return whether a higher value of a configured metric is better."""
    if isinstance(config, CustomMetricConfig):
        return config.higher_is_better
    return EVALUATION_METRICS.facts(config.name).higher_is_better
