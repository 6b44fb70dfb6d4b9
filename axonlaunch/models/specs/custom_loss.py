"""Custom losses that see the whole batch: ``register_loss``, and lookup of a run's loss.

The registry is ``config.options.losses.LOSSES``. A loss returns a sum and not a mean, because
a mean needs the count over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.options.losses import LOSSES
from axonlaunch.config.registry import keywords_of
from axonlaunch.config.schema import TrainConfig
from axonlaunch.system.text.units import Counted

if TYPE_CHECKING:
    from torch import Tensor

_Loss = TypeVar("_Loss", bound=Callable[..., Any])


@dataclass(frozen=True)
class CustomLoss:
    """A custom loss with its options.

    Attributes:
        name: Name of the loss.
        sum: Maps ``(outputs, batch)`` of a micro-batch to the sum of its loss, 0-dim.
        count: Maps a micro-batch to the number that its loss counts as; None counts targets or
            samples.
        counted: Unit of the number: tokens, images, samples or targets; None: that of the dataset.
    """

    name: str
    sum: Callable[[Any, Any], Tensor]
    count: Callable[[Any], Tensor | int] | None
    counted: Counted | None

    def require_gradient(self, total: Tensor) -> None:
        """Check the sum of all losses of a micro-batch before its backward.

        Raises:
            ConfigError: The sum does not depend on a parameter.
        """
        if not total.requires_grad:
            raise _refusal(self.name, "a tensor without a gradient")


def register_loss(
    name: str,
    *,
    config: type | None = None,
    count: Callable[[Any], Tensor | int] | None = None,
    counted: Counted | None = None,
    summary: str | None = None,
) -> Callable[[_Loss], _Loss]:
    """Register a function ``(outputs, batch) -> sum`` as ``train.loss=NAME``.

    The function is called for each micro-batch, with the model's output and the complete batch: the
    result of the dataset's collate, or a dict of ``inputs`` and ``targets`` for a dataset of pairs.
    It returns a sum, one number. The loss of a step is the sum over all micro-batches of all ranks,
    divided by the total of their counts, so it is the same in any layout.

    Args:
        name: Name of the loss.
        config: Dataclass with a field ``name`` that defines the keys of ``train.loss_options``; the
            function gets an instance as its third argument. If None, it gets the keys of
            ``train.loss_options.arguments`` as keyword arguments.
        count: Maps a micro-batch, before the forward, to the number that divides its sum. By
            default, the number of targets that are not -100 for a dataset of pairs, otherwise the
            number of samples.
        counted: Unit of the number, used in names of metrics: tokens, images, samples or targets.
            By default, targets with ``count``, otherwise the unit of the dataset.
        summary: One line for ``axonlaunch ls losses``; by default the first line of the docstring.

    Raises:
        ValueError: The name is already registered, ``config`` is not a dataclass with a field
            ``name``, or ``counted`` is none of these words.
    """
    LOSSES.check_config(name, config)
    if counted is None and count is not None:
        counted = "targets"
    if counted not in (None, *get_args(Counted)):
        raise ValueError(f"counted={counted!r}: use one of {', '.join(get_args(Counted))}")

    def register(loss: _Loss) -> _Loss:
        def with_options(options: Any) -> CustomLoss:
            def total(outputs: Any, batch: Any) -> Tensor:
                if config is not None:
                    return _require_sum(name, loss(outputs, batch, options))
                return _require_sum(name, loss(outputs, batch, **options.arguments))

            return CustomLoss(name, total, count, counted)

        description = summary or (loss.__doc__ or f"from {loss.__module__}").splitlines()[0]
        arguments = None if config else keywords_of(loss, passed=2)
        LOSSES.add(name, with_options, summary=description, config=config, arguments=arguments)
        return loss

    return register


def _require_sum(name: str, result: Any) -> Tensor:
    """Return the result of a loss, 0-dim.

    Raises:
        ConfigError: The result is not a tensor with one element.
    """
    import torch

    if not isinstance(result, torch.Tensor):
        raise _refusal(name, type(result).__name__)
    if result.numel() != 1:
        raise _refusal(name, f"a tensor of shape {[*result.shape]}")
    return result.reshape(())


def _refusal(name: str, returned: str) -> ConfigError:
    message = (
        f"it returned {returned}; return the sum over the batch as a tensor with one element that "
        "is computed from the outputs"
    )
    return ConfigError([ConfigIssue("train.loss", message, name)])


def build_custom_loss(train: TrainConfig) -> CustomLoss | None:
    """Return the custom loss that a run selects; None selects the model's loss."""
    if train.loss is None:
        return None
    loss: CustomLoss = LOSSES.get(train.loss)(train.loss_options)
    return loss
