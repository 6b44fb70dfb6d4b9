"""ZeRO-1: parameters and gradients whole on every rank, optimizer states divided among them.

It divides the update; the gradients come averaged, from ``DDP``.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from axonlaunch.comm.gradient_bucket import buckets
from axonlaunch.comm.torch_compat import all_gather_single
from axonlaunch.config.optimizer import OptimizerConfig
from axonlaunch.config.optimizer_states import ParameterFacts
from axonlaunch.engines.optimizer.step import Update, local_part

_LARGE = 4 * 2**20
"""Bytes of a parameter that is gathered by itself, straight to its place."""
_FULL = 25 * 2**20
"""Bytes of parameters that are gathered together, as many as DDP reduces together."""


class ShardedUpdate(Update):
    """Updates each rank's rows of every parameter, then gathers the rows of the others.

    The rows are DTensors over the parameters' own storage, placed as fully_shard places them, so
    optimizer states are saved and loaded as those of any other layout. Of a parameter that is
    divided over a tensor axis already, it is this rank's part whose rows are divided.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, Tensor],
        *,
        mesh: DeviceMesh,
        axis: str = "dp_replicate",
        facts: Mapping[str, ParameterFacts] | None = None,
    ) -> None:
        """Divide parameters by rows.

        Args:
            config: The optimizer's figures.
            parameters: By fully-qualified name, the same on every rank of the axis; plain, or
                DTensors on ``mesh["tp"]``.
            mesh: The run's.
            axis: The ranks that divide the states.
            facts: What else is known of the parameters, by the same names; None: nothing.
        """
        self._parameters = dict(parameters)
        self._root = mesh
        self._mesh = mesh[axis]
        rows = {name: nn.Parameter(self._rows(p)) for name, p in parameters.items()}
        super().__init__(config, rows, parameters=facts)

    def _rows(self, parameter: Tensor) -> DTensor:
        """Return a DTensor whose local part is a view of this rank's rows of a parameter."""
        local = local_part(parameter.detach())
        mesh, placements = self._mesh, [self._placement(parameter)]
        if isinstance(parameter, DTensor):
            names = (
                *(self._mesh.mesh_dim_names or ()),
                *(parameter.device_mesh.mesh_dim_names or ()),
            )
            mesh, placements = self._root[names], [*placements, *parameter.placements]
        if local.ndim:
            start, stop = self._range(local, self._mesh.get_local_rank())
            local = local[start:stop]
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _placement(self, parameter: Tensor) -> Placement:
        """Return how the data axis divides a parameter: after the tensor axis, if both cut rows."""
        if parameter.ndim == 0:
            return Replicate()
        if isinstance(parameter, DTensor) and getattr(parameter.placements[0], "dim", None) == 0:
            return _StridedShard(0, split_factor=parameter.device_mesh.size())
        return Shard(0)

    def _range(self, local: Tensor, rank: int) -> tuple[int, int]:
        """Return first and last row of a rank: torch.chunk's, which is Shard(0)'s, division."""
        rows = local.shape[0]
        step = -(-rows // self._mesh.size())
        return min(rank * step, rows), min((rank + 1) * step, rows)

    def collect_gradients(self) -> None:
        """Give each shard its rows of the parameter's whole gradient."""
        for name, whole in self._parameters.items():
            shard = self.tensors[name]
            shard.grad = None if whole.grad is None else self._rows(whole.grad)

    def apply(self, *, rate: Callable[[float], float]) -> None:
        """Update this rank's rows and gather everyone's."""
        super().apply(rate=rate)
        self._gather()

    def forget_gradients(self) -> None:
        """Free every gradient, of shards and of whole parameters."""
        super().forget_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _gather(self) -> None:
        group, size = self._mesh.get_group(), self._mesh.size()
        rank = self._mesh.get_local_rank()
        works, small = [], []
        for parameter in self._parameters.values():
            whole = local_part(parameter.detach())
            if whole.ndim == 0 or whole.numel() == 0:
                continue
            if whole.nbytes < _LARGE or whole.shape[0] % size or not whole.is_contiguous():
                small.append(whole)
                continue
            # Where they are to be already: nothing of them is copied, as fully_shard gathers.
            mine = whole[slice(*self._range(whole, rank))]
            works.append(all_gather_single(whole, mine, group=group, async_op=True))
        together = [_Bucket(wholes, ranks=size) for wholes in buckets(small, limit=_FULL)]
        for bucket in together:
            mine = bucket.pack([whole[slice(*self._range(whole, rank))] for whole in bucket.wholes])
            works.append(all_gather_single(bucket.gathered, mine, group=group, async_op=True))
        for work in works:
            work.wait()
        for bucket in together:
            bucket.unpack()


class _Bucket:
    """Parameters whose rows travel in one message, for one costs more than what is in it."""

    def __init__(self, wholes: list[Tensor], *, ranks: int) -> None:
        self.wholes = wholes
        self._ranks = ranks
        # Of a rank; the last ones' are padded.
        self._rows = [-(-whole.shape[0] // ranks) for whole in wholes]
        self._lengths = [
            rows * whole[0].numel() for rows, whole in zip(self._rows, wholes, strict=True)
        ]
        self.gathered = wholes[0].new_empty(ranks * sum(self._lengths))

    def pack(self, pieces: list[Tensor]) -> Tensor:
        """Return a rank's rows of every parameter, one after another."""
        flat = self.gathered.new_zeros(sum(self._lengths))
        places = zip(flat.split(self._lengths), pieces, strict=True)
        torch._foreach_copy_([to[: part.numel()].view(part.shape) for to, part in places], pieces)
        return flat

    def unpack(self) -> None:
        """Copy the rows of all ranks to the parameters."""
        by_rank = self.gathered.view(self._ranks, -1).split(self._lengths, dim=1)
        for whole, rows, pieces in zip(self.wholes, self._rows, by_rank, strict=True):
            # The padding is at the end of the last ranks' rows, so at the very end.
            gathered = pieces.reshape(self._ranks * rows, *whole.shape[1:])
            whole.copy_(gathered[: whole.shape[0]])
