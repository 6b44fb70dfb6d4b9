"""Muon: torch's for full matrices; for sharded ones, torch's iteration on each matrix's owner.

It accepts only matrices, and experts that pack their matrices in one parameter.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; owned
matrices: Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from axonlaunch.comm.mesh import local_part
from axonlaunch.engines.optimizer.algorithms.owned_matrices import (
    OwnedMatrices,
    divisions_of_matrix,
    indices_by_axes,
    only_plain_tensors,
)


class ShardedMuon(Muon):
    """torch's Muon that also supports DTensors; bitwise the same result for the same gradients.

    The momentum is sharded like the parameter. Each rank orthogonalizes the updates of the matrices
    it owns, in bf16, which is also the type in which they are communicated. A parameter with the
    matrices of several experts, [experts, m, n], is updated like separate matrices.
    """

    def __init__(self, params: Iterable[dict[str, Any]], **options: Any) -> None:
        """Take groups of matrices and of stacks of matrices, and torch's options."""
        groups = list(params)
        # torch's class refuses tensors that are not matrices.
        matrices = [{**g, "params": [p for p in g["params"] if p.ndim == 2]} for g in groups]
        super().__init__(matrices, **options)
        for group, given in zip(self.param_groups, groups, strict=True):
            group["params"] = list(given["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient. All ranks that share a matrix must call it."""
        groups = self.param_groups
        with only_plain_tensors(self, most_dims=2):
            loss = super().step(closure)  # type: ignore[no-untyped-call]
        for group in groups:
            others = [
                p
                for p in group["params"]
                if p.grad is not None and (p.ndim > 2 or isinstance(p, DTensor))
            ]
            for indices in indices_by_axes(others):
                self._update(group, [others[index] for index in indices])
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters whose matrices are sharded over the same axes."""
        iteration = {name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}
        divided = [divisions_of_matrix(p) for p in parameters]
        if not divided[0]:
            for p in parameters:
                updates = [
                    orthogonalized(update, **iteration)
                    for update in _matrices(self._momentum(group, p).bfloat16())
                ]
                _apply(group, p, updates)
            return
        parts = [_matrices(self._momentum(group, p).bfloat16()) for p in parameters]
        mesh = cast("DTensor", parameters[0]).device_mesh
        sizes = [len(of_parameter) for of_parameter in parts]
        owned = OwnedMatrices(
            mesh,
            [cuts for cuts, size in zip(divided, sizes, strict=True) for _ in range(size)],
            costs=[
                _cost(*p.shape[-2:])
                for p, size in zip(parameters, sizes, strict=True)
                for _ in range(size)
            ],
        )
        full_tensors = owned.gather([update for of_parameter in parts for update in of_parameter])
        del parts
        full_tensors = {n: orthogonalized(full, **iteration) for n, full in full_tensors.items()}
        scattered = iter(owned.scatter(full_tensors))
        for p, size in zip(parameters, sizes, strict=True):
            _apply(group, p, list(islice(scattered, size)))

    def _momentum(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """Update this rank's momentum; return its part of what is orthogonalized."""
        assert p.grad is not None
        gradient = local_part(p.grad)
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = self.state[p]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _matrices(part: Tensor) -> Sequence[Tensor]:
    """Return the matrices of a rank's part of a parameter."""
    return [part] if part.ndim == 2 else part.unbind()


def _apply(group: dict[str, Any], p: Tensor, updates: Sequence[Tensor]) -> None:
    """Decay this rank's part of a parameter, and subtract the updates of its matrices."""
    rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], *p.shape[-2:])
    part = local_part(p)
    part.mul_(1 - group["lr"] * group["weight_decay"])
    for matrix, update in zip(_matrices(part), updates, strict=True):
        matrix.add_(update, alpha=-rate)


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
