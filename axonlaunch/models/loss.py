"""The loss that every model here is trained by.

It sums and never averages: who averages must know the count over all ranks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from axonlaunch.models.spec import IGNORE_INDEX


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross entropy in nats of logits [..., C] against classes [...], in fp32."""
    return F.cross_entropy(
        outputs.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
