"""Defines the matrices A and B of an adapter."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class LoraMatrix(nn.Linear):
    """A or B of an adapter; computes in the dtype of its input, like fp32 weights under autocast.

    Attributes:
        gives_partial_sums: Whether the adapted layer sums its outputs over ranks.
        gets_partial_gradients: Whether gradients of the outputs must be summed over ranks.
    """

    gives_partial_sums: bool = False
    gets_partial_gradients: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))
