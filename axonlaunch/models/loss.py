"""The loss that every model here is trained by.

It sums and never averages: who averages must know the count over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from axonlaunch.models.spec import IGNORE_INDEX, ModelOutputs


def cross_entropy_sum(outputs: Tensor | ModelOutputs, targets: Tensor) -> Tensor:
    """Return the summed cross entropy in nats of logits [..., C] against classes [...], in fp32.

    An auxiliary loss counts as often as targets do.
    """
    return with_auxiliary_loss(_cross_entropy_sum, outputs, targets)


def with_auxiliary_loss(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor | ModelOutputs, targets: Tensor
) -> Tensor:
    """Return a sum over counted targets, and a model's auxiliary loss as often as they are counted.

    Over the number of counted targets it is the mean and the auxiliary loss.

    Args:
        loss: ``(logits, targets)`` to the sum.
        outputs: Logits, or those and an auxiliary loss.
        targets: Classes.
    """
    if isinstance(outputs, Tensor):
        return loss(outputs, targets)
    counted = (targets != IGNORE_INDEX).sum()
    return loss(outputs.logits, targets) + outputs.auxiliary_loss.float() * counted


def _cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
