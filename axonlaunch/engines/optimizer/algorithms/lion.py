"""The Lion optimizer: updates by the sign of a momentum, which is its only state.

Works on plain tensors, elementwise. torch has no such optimizer.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Updates parameters by ``p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``.

    Then ``m = b2 * m + (1 - b2) * g``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        eps: float = 0.0,
    ) -> None:
        """Create the optimizer.

        Args:
            params: Parameters, or groups of them.
            betas: Weight of the momentum in the update, and of the old momentum in the new one.
            weight_decay: Decoupled weight decay.
            eps: If above 0, the sign of c is replaced by ``c / (abs(c) + eps)``.
        """
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        update_beta, momentum_beta = group["betas"]
        gradients = [p.grad for p in parameters if p.grad is not None]
        momenta = [self.state[p]["exp_avg"] for p in parameters]
        updates = torch._foreach_lerp(gradients, momenta, update_beta)
        if group["eps"]:
            sizes = torch._foreach_abs(updates)
            torch._foreach_add_(sizes, group["eps"])
            torch._foreach_div_(updates, sizes)
        else:
            torch._foreach_sign_(updates)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - momentum_beta)
