"""Local SGD (Stich, 2019): replicas train separately, and periodically average parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

import axonlaunch as ax


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig:
    """Options of local SGD."""

    name: str = "local_sgd"
    """name of the variant"""
    period: int = field(default=4, metadata={"min": 1})
    """steps between two averages of the parameters"""


@ax.register_data_parallel(
    "local_sgd",
    config=LocalSGDConfig,
    averages="parameters",
    period=lambda options: options.period,
)
class LocalSGD(ax.Replicas):
    """Replicas that average parameters every strategy.options.period steps."""

    def after_update(self, *, step: int) -> None:
        """Average the parameters where a period ends."""
        if step % self.options.period == 0:
            self.agree(self.module.parameters())

    @torch.no_grad()
    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Average over the data ranks."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.group.torch_group)
            tensor /= self.group.size
