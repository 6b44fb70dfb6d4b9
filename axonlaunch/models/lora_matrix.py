"""The matrices A and B of an adapter."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class LoraMatrix(nn.Linear):
    """A or B; it computes in the type of what it is given, as fp32 weights do under autocast.

    Attributes:
        gives_partial_sums: Whether the layer that it adapts adds its outputs up over ranks.
        gets_partial_gradients: Whether the gradients of its outputs would have to be.
    """

    gives_partial_sums: bool = False
    gets_partial_gradients: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))
