"""Metrics of evaluations: ``register_metric``, the included accuracy, and a run's metrics.

The registry is ``config.options.training_hooks.EVALUATION_METRICS``. A metric returns sums and not
a mean, so that they can be added over micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.code.plugins import import_callable
from axonlaunch.config.options.training_hooks import (
    EVALUATION_METRICS,
    AccuracyConfig,
    CustomMetricConfig,
    MetricFacts,
    is_higher_better,
    metric_name,
)
from axonlaunch.config.registry import keywords_of
from axonlaunch.models.specs.model_spec import IGNORE_INDEX

if TYPE_CHECKING:
    from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Value = Callable[[Sequence[float]], float]


def ratio(sums: Sequence[float]) -> float:
    """Return the first sum divided by the second; NaN if that is 0."""
    total, count = sums
    return total / count if count else math.nan


@dataclass(frozen=True)
class Metric:
    """A metric with its options.

    Attributes:
        name: Name under which it is reported.
        key: Dotted key of the metric in the configuration, for messages.
        function: Maps ``(outputs, batch)`` to a tensor of sums.
        num_sums: Number of sums.
        value: Maps the sums of all samples to the metric.
        higher_is_better: Whether a higher value is better.
    """

    name: str
    key: str
    function: Callable[[Any, Any], Any]
    num_sums: int = 2
    value: _Value = ratio
    higher_is_better: bool = True

    def compute(self, sums: Sequence[float]) -> float:
        """Return the metric of the added sums; NaN if its formula divides by 0."""
        try:
            return float(self.value(sums))
        except ZeroDivisionError:
            return math.nan

    def sums(self, outputs: Any, batch: Any) -> Tensor:
        """Return the sums of a micro-batch, [num_sums] fp64.

        Args:
            outputs: Complete outputs of the model.
            batch: Complete micro-batch.

        Raises:
            ConfigError: The function returned something else.
        """
        from torch import Tensor

        sums = self.function(outputs, batch)
        if isinstance(sums, Tensor) and sums.shape == (self.num_sums,):
            return sums.double()
        kind = f"a tensor of shape {list(sums.shape)}" if isinstance(sums, Tensor) else repr(sums)
        example = "torch.stack([total, count])" if self.num_sums == 2 else "torch.stack([...])"
        message = f"it returned {kind}; return a tensor of {self.num_sums} sums, as in {example}"
        raise ConfigError([ConfigIssue(self.key, message, self.name)])


def register_metric(
    name: str,
    *,
    config: type | None = None,
    sums: int = 2,
    value: _Value = ratio,
    higher_is_better: bool = True,
    summary: str | None = None,
) -> Callable[[_Function], _Function]:
    """Register a function ``(outputs, batch) -> sums`` as ``metrics=[NAME]``.

    The function is called for each micro-batch of an evaluation, with the model's complete outputs
    and the batch: the result of the dataset's collate, or a dict of ``inputs`` and ``targets`` for
    a dataset of pairs, without rows that have no counted target. It returns a tensor of sums, which
    are added over micro-batches and ranks, so the metric is the same in any layout.

    Args:
        name: Name of the metric; metrics.jsonl and loggers have it as ``eval_NAME``.
        config: Dataclass with a field ``name`` that types ``{name: NAME, ...}`` in the list; the
            function gets an instance as its third argument. None: it gets the entries of
            ``arguments`` as keywords.
        sums: Number of sums.
        value: Maps the added sums, a list of numbers, to the metric; by default the first divided
            by the second. A division by 0 gives NaN.
        higher_is_better: Whether a higher value is better; ``train.best_metric`` uses it.
        summary: One line for ``axonlaunch ls metrics``; None for the docstring's first line.

    Raises:
        ValueError: The name is taken, or the configuration is not a dataclass with a name.
    """
    EVALUATION_METRICS.check_config(name, config)
    facts = MetricFacts(num_sums=sums, higher_is_better=higher_is_better)

    def register(function: _Function) -> _Function:
        def with_options(options: Any, *, key: str) -> Metric:
            def bound(outputs: Any, batch: Any) -> Any:
                if config is not None:
                    return function(outputs, batch, options)
                return function(outputs, batch, **options.arguments)

            return Metric(name, key, bound, sums, value, higher_is_better)

        described = summary or (function.__doc__ or f"from {function.__module__}").splitlines()[0]
        arguments = None if config else keywords_of(function, passed=2)
        EVALUATION_METRICS.add(
            name,
            with_options,
            summary=described,
            config=config,
            facts=facts,
            arguments=arguments,
        )
        return function

    return register


def build_metrics(config: RunConfig) -> tuple[Metric, ...]:
    """Return the metrics that a run selects.

    Raises:
        ConfigError: A custom metric can't be imported or does not accept its arguments.
    """
    return tuple(
        EVALUATION_METRICS.get(metric.name)(metric, key=f"metrics[{number}]")
        for number, metric in enumerate(config.metrics)
    )


def make_accuracy(config: AccuracyConfig, *, key: str) -> Metric:
    """Return the metric ``accuracy``: the fraction of counted targets that are predicted."""
    return Metric(config.name, key, accuracy_sums)


def make_custom_metric(config: CustomMetricConfig, *, key: str) -> Metric:
    """Return the metric with a user's function, which it imports.

    Args:
        config: Configuration of the metric; ``target`` is the import path.
        key: Configuration key of the metric in errors, such as ``metrics[0]``.

    Raises:
        ConfigError: The function can't be imported or does not accept its arguments.
    """
    function = import_callable(f"{key}.target", config.target, config.arguments, passed=2)
    bound = partial(function, **config.arguments)
    return Metric(metric_name(config), key, bound, higher_is_better=is_higher_better(config))


def accuracy_sums(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the number of correct and of counted targets.

    Args:
        outputs: Scores of classes [..., C].
        batch: ``targets`` [...], classes; ``IGNORE_INDEX`` is not counted.
    """
    import torch

    targets = batch["targets"]
    counted = targets != IGNORE_INDEX
    correct = (outputs.argmax(-1) == targets) & counted
    return torch.stack([correct.sum(), counted.sum()])
