"""Shards parameters over the tensor axis and gives forwards the local shards as plain tensors.

This module knows no layers and no plans. Parameters remain DTensors, so optimizers, clipping and
checkpoints work on any mesh. A forward reads this rank's shard as a plain tensor; its gradient
flows back to the DTensor. Sizes that are not divisible by the axis are an error.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import copy_to_group, sum_over
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.comm.process_group import default_group
from axonlaunch.config.problems.errors import divisor_of
from axonlaunch.engines.tensor.torch_internals import spec_of
from axonlaunch.models.tensors.dtensor_regions import packed_placement
from axonlaunch.models.torch_internals import local_tensor


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded.

    Attributes:
        dim: The sharded dim.
        pieces: Number of equal tensors concatenated along ``dim``; each of them is sharded.
    """

    dim: int
    pieces: int = 1


class TensorAxis:
    """The ranks that share layers, and state common to all modules of one module tree.

    Attributes:
        mesh: One-dimensional mesh of the ranks, used by all DTensors of the tree.
        group: Process group of the ranks.
        overlaps: Whether the backward of a region's layers is computed together.
        computes: Whether a forward of the tree is running, in which modules read local parameters.
    """

    def __init__(
        self, mesh: DeviceMesh, *, group: ProcessGroup | None = None, overlaps: bool = True
    ) -> None:
        self.mesh = mesh
        self.overlaps = overlaps
        self.group = group or ProcessGroup.from_torch(mesh.get_group())
        self.computes = False

    @classmethod
    def of_group(cls, group: ProcessGroup | None) -> Self:
        """Create the axis of a group; None for the whole world."""
        group = group or default_group()
        kind = device_of(group).type
        mesh = DeviceMesh.from_group(group.torch_group, kind, mesh_dim_names=("tp",))
        return cls(mesh, group=group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the axis itself, because process groups cannot be copied."""
        return self

    def distribute(self, module: nn.Module) -> None:
        """Replace every parameter of a module tree with a DTensor that holds this rank's shard.

        ``shard_specs`` of a module or of its class maps parameter names to a dim or a
        ``ShardSpec``; other parameters are replicated. Before the call, parameters must be the same
        on every rank, or on ``meta``; nothing is communicated. Tied parameters stay tied.

        Raises:
            ValueError: Two modules share a parameter but shard it differently.
        """
        placed_by_parameter: dict[nn.Parameter, tuple[ShardSpec | None, nn.Parameter]] = {}
        for submodule in module.modules():
            for key, parameter in list(submodule._parameters.items()):
                if parameter is None or isinstance(parameter, DTensor):
                    continue  # experts are sharded over another axis
                shard = shard_spec(submodule, key)
                if parameter not in placed_by_parameter:
                    placed_by_parameter[parameter] = shard, self._local_parameter(parameter, shard)
                first_shard, placed = placed_by_parameter[parameter]
                if first_shard != shard:
                    raise ValueError(
                        f"{submodule} shares its {key} with a module that shards it differently"
                    )
                setattr(submodule, key, placed)

    def _local_parameter(self, parameter: nn.Parameter, shard: ShardSpec | None) -> nn.Parameter:
        full_tensor = parameter.detach()
        local_shard: Tensor = full_tensor
        placement: Placement = Replicate()
        if shard is not None:
            local_shard, placement = self.part_of(full_tensor, shard), Shard(shard.dim)
            if shard.pieces > 1:
                placement = packed_placement(shard.dim, pieces=shard.pieces)
        dtensor = DTensor.from_local(
            local_shard,
            self.mesh,
            [placement],
            shape=full_tensor.shape,
            stride=full_tensor.contiguous().stride(),
        )
        return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)

    def part_of(self, full_tensor: Tensor, shard: ShardSpec) -> Tensor:
        """Return this rank's part of a full tensor, contiguous."""
        parts = [
            piece.narrow(shard.dim, *rank_part(piece.shape[shard.dim], self.group))
            for piece in full_tensor.chunk(shard.pieces, shard.dim)
        ]
        if len(parts) == 1:
            return parts[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(parts, shard.dim)


def shard_spec(module: nn.Module, key: str) -> ShardSpec | None:
    """Return how a parameter of a module is sharded; None if it is replicated."""
    specs = module.__dict__.get("shard_specs") or getattr(type(module), "shard_specs", {})
    dim_or_spec: int | ShardSpec | None = specs.get(key)
    return ShardSpec(dim_or_spec) if isinstance(dim_or_spec, int) else dim_or_spec


def output_pieces(layer: nn.Module) -> int:
    """Return the number of tensors that are packed in a layer's output and sharded separately."""
    shard = shard_spec(layer, "weight")
    return 1 if shard is None else shard.pieces


def to_local(parameter: Tensor, *, summed_over: ProcessGroup | None = None) -> Tensor:
    """Return this rank's shard of a DTensor as a plain tensor, differentiable.

    Args:
        parameter: A DTensor; a plain tensor is returned unchanged.
        summed_over: Group over which the gradient is summed, if each rank sees only part of it. It
            is summed in fp32 and then has the type of the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        local: Tensor = parameter.to_local()
        if summed_over is None:
            return local
        # Backward sums in the type of this copy, which the compiler does not store.
        return copy_to_group(local.to(_sum_dtype(local)), summed_over).to(local.dtype)
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return local_tensor(parameter)
    part: Tensor = _to_local(parameter, summed_over)
    return part


def _sum_dtype(partial: Tensor) -> torch.dtype:
    """Return the type in which partial gradients are added up: at least fp32."""
    return torch.promote_types(partial.dtype, torch.float32)


class _LocalPart(torch.autograd.Function):
    """Implements ``to_local`` in a third of DTensor's time, which matters to small layers."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, summed_over: ProcessGroup | None) -> Tensor:
        ctx.spec, ctx.summed_over = spec_of(parameter), summed_over
        return local_tensor(parameter).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.summed_over is not None:
            summand = gradient.to(_sum_dtype(gradient))
            gradient = sum_over(summand, ctx.summed_over).to(gradient.dtype)
        # Copy the spec, because sharding propagation writes into the specs it is passed.
        gradient = gradient.contiguous()
        return DTensor(gradient, copy.copy(ctx.spec), requires_grad=False), None


_to_local: Any = _LocalPart.apply


class ReadsLocally(nn.Module):
    """Mixin before a module's class that gives its forward plain local parameters.

    Example: 2 ranks shard ``nn.Linear(8, 6)`` by outputs. Outside of a forward, ``layer.weight`` is
    a DTensor of shape [6, 8]. Inside ``Linear.forward`` the same expression returns a plain tensor
    [3, 8], this rank's rows, and the gradient is accumulated in the DTensor's ``grad``.

    Code outside of the forward, and anything that uses ``named_parameters`` or ``state_dict``, sees
    the DTensors. While FSDP keeps a parameter sharded, the parameter is on a different mesh and is
    returned unchanged; nothing can compute with it in that state.
    """

    _axis: TensorAxis
    _sums_gradients: bool

    def __getattr__(self, name: str) -> Any:
        parameter = self.__dict__["_parameters"].get(name)
        if (
            parameter is not None
            and parameter.is_floating_point()  # others are read by QuantizedWeights
            and self._axis.computes
            and _is_on_mesh(parameter, self._axis.mesh)
        ):
            sums = self._sums_gradients and parameter.placements[0].is_replicate()
            return to_local(parameter, summed_over=self._axis.group if sums else None)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's original forward."""
        axis = self._axis
        if axis.computes:
            return super().forward(*args, **kwargs)
        axis.computes = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            axis.computes = False


def rank_part(size: int, group: ProcessGroup) -> tuple[int, int]:
    """Return ``(first, count)`` of this rank's part of ``size``; the last part may be shorter.

    The division is that of ``torch.chunk`` and ``Shard``. Only vocabularies have unequal parts.
    """
    length = -(-size // group.size)
    first = min(group.rank * length, size)
    return first, min(length, size - first)


def empty_part(name: str, size: int, ranks: int) -> str | None:
    """Return an error message if the last of ``ranks`` parts is empty; None otherwise."""
    if -(-size // ranks) * (ranks - 1) < size:
        return None
    return f"{name}={size} leaves the last of {ranks} ranks without any; use {divisor_of(size)}"


def local_entries(entries: Tensor, group: ProcessGroup, *, size: int) -> tuple[Tensor, Tensor]:
    """Map token ids of a vocabulary of ``size`` to this rank's rows.

    Returns:
        Row numbers on this rank, with 0 for tokens of other ranks; and a mask of the tokens of
        other ranks.
    """
    first, count = rank_part(size, group)
    entries = entries - first
    elsewhere = (entries < 0) | (entries >= count)
    return entries.masked_fill(elsewhere, 0), elsewhere


def _is_on_mesh(parameter: Tensor, mesh: DeviceMesh) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh == mesh


def refuse_indivisible(name: str, size: int, group: ProcessGroup) -> None:
    """Raise an error if a size cannot be split into equal parts, one for each rank.

    Raises:
        ValueError: Names the size and the group sizes that divide it.
    """
    if size % group.size:
        raise ValueError(
            f"{name}={size} is not divisible by the group's {group.size} ranks; use a group of "
            f"{divisor_of(size)}"
        )
