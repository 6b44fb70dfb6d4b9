"""Muon: of whole matrices torch's, of divided ones torch's iteration on the ranks that own them.

What is no matrix torch refuses.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; of owned
matrices Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from axonlaunch.engines.optimizer.owned_matrices import (
    OwnedMatrices,
    alike,
    divisions,
    of_plain_tensors,
)


class ShardedMuon(Muon):
    """torch's Muon that also takes DTensors; the same to the bit for the same gradients.

    Momentum is divided as the parameter is. Each rank orthogonalizes the updates of the matrices
    that it owns, in bf16, in which they travel.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient; all ranks that divide one call this."""
        groups = self.param_groups
        with of_plain_tensors(self):
            loss = super().step(closure)  # type: ignore[no-untyped-call]
        for group in groups:
            divided = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
            for places in alike(divided):
                self._update(group, [divided[place] for place in places])
        return loss

    def _update(self, group: dict[str, Any], matrices: list[DTensor]) -> None:
        updates = [self._momentum(group, p) for p in matrices]
        iteration = {name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}
        if not divisions(matrices[0]):
            updates = [orthogonalized(update.bfloat16(), **iteration) for update in updates]
        else:
            owned = OwnedMatrices(matrices, costs=[_cost(*p.shape) for p in matrices])
            wholes = owned.gather([update.bfloat16() for update in updates])
            del updates
            wholes = {n: orthogonalized(whole, **iteration) for n, whole in wholes.items()}
            updates = owned.scatter(wholes)
        for p, update in zip(matrices, updates, strict=True):
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], *p.shape)
            part = p.to_local()
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(update, alpha=-rate)

    def _momentum(self, group: dict[str, Any], p: DTensor) -> Tensor:
        """Move this rank's part of the momentum; return that of what is to be orthogonalized."""
        assert isinstance(p.grad, DTensor)
        gradient = p.grad.to_local()
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = self.state[p]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalized(matrix: Tensor, **iteration: Any) -> Tensor:
    """Return about U V^T of a bf16 matrix U S V^T, in bf16, as torch's Muon finds it.

    It is what Muon takes from zeros at a rate of 1, without momentum. A tall matrix is turned, as
    Muon itself turns it, for its rate would be adjusted to its shape.

    Args:
        matrix: [m, n]; not changed.
        iteration: torch's ``ns_coefficients``, ``ns_steps`` and ``eps``.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    taken = nn.Parameter(torch.zeros_like(wide))
    taken.grad = wide
    options = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, **iteration}
    Muon([taken], **options).step()
    orthogonal = taken.detach().neg_()
    return orthogonal.T if is_tall else orthogonal


def _adjust_lr(lr: float, kind: str, rows: int, columns: int) -> float:
    """Return the rate of a matrix of a shape, as ``torch.optim.Muon`` documents it."""
    if kind == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns))


def _cost(rows: int, columns: int) -> float:
    """Return what an iteration takes, about: products of the shorter side with the whole."""
    return float(rows * columns * min(rows, columns))
