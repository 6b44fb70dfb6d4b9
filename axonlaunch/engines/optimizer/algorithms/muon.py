"""Muon: torch's for full matrices; for sharded ones, torch's iteration on each matrix's owner.

Like torch's Muon, it accepts only matrices.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; owned
matrices: Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from axonlaunch.engines.optimizer.algorithms.owned_matrices import (
    OwnedMatrices,
    alike,
    divisions,
    only_plain_tensors,
)


class ShardedMuon(Muon):
    """torch's Muon that also supports DTensors; bitwise the same result for the same gradients.

    The momentum is sharded like the parameter. Each rank orthogonalizes the updates of the matrices
    it owns, in bf16, which is also the type in which they are communicated.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient. All ranks that share a matrix must call it."""
        groups = self.param_groups
        with only_plain_tensors(self):
            loss = super().step(closure)  # type: ignore[no-untyped-call]
        for group in groups:
            divided = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
            for indices in alike(divided):
                self._update(group, [divided[index] for index in indices])
        return loss

    def _update(self, group: dict[str, Any], matrices: list[DTensor]) -> None:
        updates = [self._momentum(group, p) for p in matrices]
        iteration = {name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}
        if not divisions(matrices[0]):
            updates = [orthogonalized(update.bfloat16(), **iteration) for update in updates]
        else:
            owned = OwnedMatrices(matrices, costs=[_cost(*p.shape) for p in matrices])
            full_tensors = owned.gather([update.bfloat16() for update in updates])
            del updates
            full_tensors = {
                n: orthogonalized(full, **iteration) for n, full in full_tensors.items()
            }
            updates = owned.scatter(full_tensors)
        for p, update in zip(matrices, updates, strict=True):
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], *p.shape)
            part = p.to_local()
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(update, alpha=-rate)

    def _momentum(self, group: dict[str, Any], p: DTensor) -> Tensor:
        """Update this rank's momentum; return its part of the matrix to orthogonalize."""
        assert isinstance(p.grad, DTensor)
        gradient = p.grad.to_local()
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = self.state[p]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalized(matrix: Tensor, **iteration: Any) -> Tensor:
    """Return approximately U V^T of a bf16 matrix U S V^T, in bf16, computed by torch's Muon.

    The result is the negative of Muon's update of a zero matrix at a rate of 1, without momentum.
    Tall matrices are transposed, as in Muon, because Muon would otherwise adjust the rate to their
    shape.

    Args:
        matrix: Matrix [m, n]; not modified.
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
    """Return the learning rate for a matrix shape, as documented for ``torch.optim.Muon``."""
    if kind == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns))


def _cost(rows: int, columns: int) -> float:
    """Return the approximate cost of an iteration: products of the shorter side with the matrix."""
    return float(rows * columns * min(rows, columns))
