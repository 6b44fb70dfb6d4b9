"""An optimizer that updates by the sign of a momentum (Bernstein et al., "signSGD", 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import axonlaunch as ax


@dataclass(frozen=True, kw_only=True)
class SignumConfig:
    """SGD by the sign of its momentum."""

    name: str = "signum"
    """name of the optimizer"""
    lr: float = field(default=1e-3, metadata={"min": 0})
    """peak learning rate"""
    momentum: float = field(default=0.9, metadata={"min": 0, "below": 1})
    """share of the momentum that is kept"""


@ax.register_optimizer("signum", config=SignumConfig)
class Signum(torch.optim.Optimizer):
    """SGD by the sign of its momentum."""

    def __init__(self, params, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(state["momentum"].sign(), alpha=-group["lr"])
