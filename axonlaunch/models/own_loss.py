"""A loss of one's own, which sees the whole batch: ``register_loss``, and what a run takes of it.

The table itself is ``config.losses``'s. A loss sums: who averages must know the count of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from axonlaunch.config.losses import LOSSES
from axonlaunch.config.registry import keywords_of
from axonlaunch.config.schema import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

_Loss = TypeVar("_Loss", bound=Callable[..., Any])


@dataclass(frozen=True)
class OwnLoss:
    """A loss with its options.

    Attributes:
        sum: ``(outputs, batch)`` of a micro-batch to the loss's sum, 0-dim.
        count: A micro-batch to how much it counts; None: by its targets, or its samples.
    """

    sum: Callable[[Any, Any], Tensor]
    count: Callable[[Any], Tensor | int] | None


def register_loss(
    name: str,
    *,
    config: type | None = None,
    count: Callable[[Any], Tensor | int] | None = None,
    summary: str | None = None,
) -> Callable[[_Loss], _Loss]:
    """Register a function ``(outputs, batch) -> sum`` as ``train.loss=NAME``.

    It is called for each micro-batch, with what the model returned and with all of the batch: what
    the dataset's collate made, or of a dataset of pairs a dict of ``inputs`` and ``targets``. It
    returns a sum, 0-dim. The loss of a step is the sum over all micro-batches of all ranks, over
    what they count together, so that it is the same in any layout.

    Args:
        name: The name.
        config: Dataclass with a field ``name`` that types ``train.loss_options``; the function is
            called with one as its third argument. None: with the keys of
            ``train.loss_options.arguments`` as keywords.
        count: From a micro-batch, before the model has seen it, to what its sum is divided by;
            None: the targets that are not -100 of a dataset of pairs, else the samples.
        summary: One line for ``axonlaunch ls losses``; None: the docstring's first.

    Raises:
        ValueError: The name is taken, or the configuration is no dataclass with a name.
    """
    LOSSES.check_config(name, config)

    def register(loss: _Loss) -> _Loss:
        def with_options(options: Any) -> OwnLoss:
            def total(outputs: Any, batch: Any) -> Tensor:
                if config is not None:
                    return loss(outputs, batch, options)  # type: ignore[no-any-return]
                return loss(outputs, batch, **options.arguments)  # type: ignore[no-any-return]

            return OwnLoss(total, count)

        described = summary or (loss.__doc__ or f"from {loss.__module__}").splitlines()[0]
        arguments = None if config else keywords_of(loss, passed=2)
        LOSSES.add(name, with_options, summary=described, config=config, arguments=arguments)
        return loss

    return register


def own_loss(train: TrainConfig) -> OwnLoss | None:
    """Return the loss that a run names; None: it is the model's."""
    if train.loss is None:
        return None
    made: OwnLoss = LOSSES.get(train.loss)(train.loss_options)
    return made
