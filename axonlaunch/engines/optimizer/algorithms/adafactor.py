"""Adafactor: torch's for full tensors; for sharded ones, statistics are summed over ranks.

Only rows, columns and single numbers are communicated, never a gradient.

Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018, in
the variant of ``torch.optim.Adafactor``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor

from axonlaunch.engines.optimizer.algorithms.owned_matrices import divisions, only_plain_tensors


class ShardedAdafactor(Adafactor):
    """torch's Adafactor that also supports DTensors; it overwrites their gradients.

    The result equals torch's on full tensors up to rounding. It needs three messages per mesh axis.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every tensor that has a gradient. All ranks that share a tensor must call it."""
        groups = self.param_groups
        with only_plain_tensors(self):
            loss = super().step(closure)  # type: ignore[no-untyped-call]
        self._update(
            [
                _Part(p, group, self.state[p])
                for group in groups
                for p in group["params"]
                if isinstance(p, DTensor) and p.grad is not None
            ]
        )
        return loss

    def _update(self, parts: list[_Part]) -> None:
        sums = [(part.full, *one) for part in parts for one in part.statistics()]
        _add_up(sums)
        totals = [part.average() for part in parts]
        _add_up([(part.full, *one) for part, of in zip(parts, totals, strict=True) for one in of])
        norms = [part.rescale() for part in parts]
        _add_up([(part.full, *one) for part, one in zip(parts, norms, strict=True)])
        for part in parts:
            part.apply()


SumOverParts = tuple[Tensor, tuple[int, ...] | None]
"""This rank's term of a sum, and the parameter dims over whose shards it is summed; None: all."""


class _Part:
    """This rank's part of one parameter, during one step.

    Attributes:
        full: The parameter with the gradient of this step.
    """

    def __init__(self, full: DTensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        assert isinstance(full.grad, DTensor)
        self.full = full
        self._group = group
        self._state = state
        self._parameter, self._gradient = full.to_local(), full.grad.to_local()
        if not state:
            state.update(_new_states(self._gradient))
        state["step"] += 1
        self._step = float(state["step"])
        self._fresh = self._step ** group["beta2_decay"]
        least = group["eps"][0]
        self._least = torch.finfo(full.dtype).eps if least is None else least

    def statistics(self) -> list[SumOverParts]:
        """Return the parameter's squared norm and the gradient's squared row and column norms."""
        self._size = self._parameter.square().sum()
        if self.full.ndim < 2:
            return [(self._size, None)]
        rows, columns = self.full.ndim - 2, self.full.ndim - 1
        squares = self._gradient.square()
        self._rows = squares.sum(-1, keepdim=True)
        self._columns = squares.sum(-2, keepdim=True)
        return [(self._size, None), (self._rows, (columns,)), (self._columns, (rows,))]

    def average(self) -> list[SumOverParts]:
        """Update the running averages of squares; return a matrix's sum over rows."""
        if self.full.ndim < 2:
            self._state["variance"].lerp_(self._gradient.square(), self._fresh)
            return []
        rows, columns = self.full.shape[-2:]
        self._state["row_var"].lerp_(self._rows.div_(columns), self._fresh)
        self._state["col_var"].lerp_(self._columns.div_(rows), self._fresh)
        self._total = self._state["row_var"].sum(-2, keepdim=True)
        return [(self._total, (self.full.ndim - 2,))]

    def rescale(self) -> SumOverParts:
        """Divide the gradient by the root of its estimated squares; return its squared norm."""
        if self.full.ndim < 2:
            estimate = self._state["variance"].clone()
        else:
            estimate = self._state["row_var"] @ self._state["col_var"]
            estimate.div_((self._total / self.full.shape[-2]).clamp_(min=self._least))
        self._gradient.mul_(estimate.clamp_(min=self._least**2).rsqrt_())
        self._norm = self._gradient.square().sum()
        return self._norm, None

    def apply(self) -> None:
        """Apply weight decay and update the parameter."""
        group, root = self._group, math.sqrt(self.full.numel())
        size = (self._size.sqrt() / root).clamp(min=group["eps"][1])
        rate = size * min(group["lr"], 1 / math.sqrt(self._step))
        excess = (self._norm.sqrt() / (root * group["d"])).clamp(min=1.0)
        if group["weight_decay"]:
            self._parameter.mul_(1 - group["lr"] * group["weight_decay"])
        self._parameter.sub_(self._gradient.mul_(rate / excess))


def _add_up(sums: Sequence[tuple[DTensor, Tensor, tuple[int, ...] | None]]) -> None:
    """Sum tensors over the ranks that shard their dims, in place, one message per mesh axis."""
    divided: dict[tuple[DeviceMesh, int], list[Tensor]] = {}
    for full, part, dims in sums:
        for division in divisions(full):
            if dims is None or division.dim in dims:
                divided.setdefault((full.device_mesh, division.axis), []).append(part)
    for (mesh, axis), parts in divided.items():
        message = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(message, group=mesh.get_group(axis))
        for part, total in zip(parts, message.split([p.numel() for p in parts]), strict=True):
            part.copy_(total.view(part.shape))


def _new_states(gradient: Tensor) -> dict[str, Tensor]:
    shape = tuple(gradient.shape)
    if len(shape) < 2:
        return {"step": torch.tensor(0.0), "variance": torch.zeros_like(gradient)}
    return {
        "step": torch.tensor(0.0),
        "row_var": gradient.new_zeros((*shape[:-1], 1)),
        "col_var": gradient.new_zeros((*shape[:-2], 1, shape[-1])),
    }
