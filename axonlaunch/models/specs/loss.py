"""Cross-entropy loss of all models in this package.

It is a sum and not a mean, because a mean needs the count over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from axonlaunch.models.specs.spec import IGNORE_INDEX, ModelOutputs


def cross_entropy_sum(outputs: Tensor | ModelOutputs, targets: Tensor) -> Tensor:
    """Return the summed cross entropy, in nats, of logits [..., C] and classes [...], in fp32.

    An auxiliary loss is added once for each counted target.
    """
    return with_auxiliary_loss(_cross_entropy_sum, outputs, targets)


def with_auxiliary_loss(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor | ModelOutputs, targets: Tensor
) -> Tensor:
    """Return the sum over counted targets plus an auxiliary loss for each counted target.

    Divided by the number of counted targets, this is the mean loss plus the auxiliary loss.

    Args:
        loss: Maps ``(logits, targets)`` to the sum.
        outputs: Logits, optionally with an auxiliary loss.
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
