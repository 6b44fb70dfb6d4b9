"""The tensor axis: how parameters are cut over it, and how forwards read them as plain tensors.

It knows no layer and no plan. Parameters stay DTensors, so that optimizers, clipping and
checkpoints work in any mesh; what computes gets this rank's part, a plain tensor, whose gradient
finds its way back to the DTensor. Sizes that the axis does not divide are refused.
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
from axonlaunch.comm.argument_checks import device_of
from axonlaunch.comm.autograd import copy_to_group, sum_over
from axonlaunch.comm.process_group import default_group
from axonlaunch.config.errors import divisor_of
from axonlaunch.engines.tensor.torch_internals import spec_of
from axonlaunch.models.dtensor_regions import packed_placement
from axonlaunch.models.torch_internals import local_tensor


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided.

    Attributes:
        dim: Which is cut.
        pieces: Equal tensors that lie one behind the other in it, each of which is cut.
    """

    dim: int
    pieces: int = 1


class TensorAxis:
    """The ranks that divide layers among them, as all modules of one tree see them.

    Attributes:
        mesh: Their one-dimensional mesh, on which the tree's DTensors lie.
        group: Their process group.
        overlaps: Whether a region's layers go back together.
        computes: Whether a forward of the tree runs now, so that modules read local parameters.
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
        """Make the axis of a group; None: of the whole world."""
        group = group or default_group()
        kind = device_of(group).type
        mesh = DeviceMesh.from_group(group.torch_group, kind, mesh_dim_names=("tp",))
        return cls(mesh, group=group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Let copies of a module share it: groups can't be copied."""
        return self

    def distribute(self, module: nn.Module) -> None:
        """Make every parameter of a tree a DTensor, of which this rank keeps its part.

        A module, or its class, says in ``cuts`` which dim of a parameter is cut, or how; the others
        every rank keeps whole. Parameters are the same on every rank before, or on ``meta``;
        nothing is communicated. What is tied stays tied.

        Raises:
            ValueError: Two modules cut a parameter that they share in different ways.
        """
        made: dict[nn.Parameter, tuple[Cut | None, nn.Parameter]] = {}
        for owner in module.modules():
            cuts = owner.__dict__.get("cuts") or getattr(type(owner), "cuts", {})
            for key, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                dim_or_cut = cuts.get(key)
                cut = Cut(dim_or_cut) if isinstance(dim_or_cut, int) else dim_or_cut
                if parameter not in made:
                    made[parameter] = cut, self._place(parameter, cut)
                its_cut, placed = made[parameter]
                if its_cut != cut:
                    raise ValueError(
                        f"{owner} shares its {key} with a module that cuts it otherwise"
                    )
                setattr(owner, key, placed)

    def _place(self, parameter: nn.Parameter, cut: Cut | None) -> nn.Parameter:
        whole = parameter.detach()
        part: Tensor = whole
        placement: Placement = Replicate()
        if cut is not None:
            part, placement = self.part_of(whole, cut), Shard(cut.dim)
            if cut.pieces > 1:
                placement = packed_placement(cut.dim, pieces=cut.pieces)
        placed = DTensor.from_local(
            part, self.mesh, [placement], shape=whole.shape, stride=whole.contiguous().stride()
        )
        return nn.Parameter(placed, requires_grad=parameter.requires_grad)

    def part_of(self, whole: Tensor, cut: Cut) -> Tensor:
        """Return this rank's part of a tensor, contiguous."""
        own = [
            piece.narrow(cut.dim, *rank_part(piece.shape[cut.dim], self.group))
            for piece in whole.chunk(cut.pieces, cut.dim)
        ]
        if len(own) == 1:
            return own[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(own, cut.dim)


def to_local(parameter: Tensor, *, summed_over: ProcessGroup | None = None) -> Tensor:
    """Return what this rank holds of a DTensor, for computing with, through autograd.

    Args:
        parameter: A DTensor; a plain tensor is returned as it is.
        summed_over: The group over which to sum the gradient, where each rank sees a part of it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        local: Tensor = parameter.to_local()
        return local if summed_over is None else copy_to_group(local, summed_over)
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return local_tensor(parameter)
    part: Tensor = _to_local(parameter, summed_over)
    return part


class _LocalPart(torch.autograd.Function):
    """``to_local`` in a third of its time, which matters to small layers."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, summed_over: ProcessGroup | None) -> Tensor:
        ctx.spec, ctx.summed_over = spec_of(parameter), summed_over
        return local_tensor(parameter).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.summed_over is not None:
            gradient = sum_over(gradient, ctx.summed_over)
        # A copy of the spec, for sharding propagation writes into the ones that it meets.
        gradient = gradient.contiguous()
        return DTensor(gradient, copy.copy(ctx.spec), requires_grad=False), None


_to_local: Any = _LocalPart.apply


class ReadsLocally(nn.Module):
    """Comes before a module's own class and gives its forward plain parameters.

    An example, of 2 ranks that divide ``nn.Linear(8, 6)`` by its outputs: outside of a forward
    ``layer.weight`` is a DTensor of shape [6, 8]; in ``Linear.forward`` the same expression gives a
    plain tensor [3, 8], this rank's rows, whose gradient arrives in the DTensor's ``grad``.

    What looks from outside, and whatever goes through ``named_parameters`` or ``state_dict``,
    meets the DTensors. While FSDP holds a parameter sharded it lies on another mesh, and stays
    what it is: nothing can compute with that.
    """

    _axis: TensorAxis
    _sums_gradients: bool

    def __getattr__(self, name: str) -> Any:
        parameter = self.__dict__["_parameters"].get(name)
        if parameter is not None and self._axis.computes and _lies_on(parameter, self._axis.mesh):
            sums = self._sums_gradients and parameter.placements[0].is_replicate()
            return to_local(parameter, summed_over=self._axis.group if sums else None)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
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

    They are those of torch.chunk and of ``Shard``. All but a vocabulary has equal ones.
    """
    length = -(-size // group.size)
    first = min(group.rank * length, size)
    return first, min(length, size - first)


def empty_part(name: str, size: int, ranks: int) -> str | None:
    """Say why ``ranks`` would leave the last rank without entries; None if they do not."""
    if -(-size // ranks) * (ranks - 1) < size:
        return None
    return f"{name}={size} leaves the last of {ranks} ranks without any; use {divisor_of(size)}"


def own_entries(entries: Tensor, group: ProcessGroup, *, size: int) -> tuple[Tensor, Tensor]:
    """Map token ids of a vocabulary of ``size`` to this rank's rows.

    Returns:
        Row numbers on this rank, 0 where another rank has the row; and a mask of where.
    """
    first, count = rank_part(size, group)
    entries = entries - first
    elsewhere = (entries < 0) | (entries >= count)
    return entries.masked_fill(elsewhere, 0), elsewhere


def _lies_on(parameter: Tensor, mesh: DeviceMesh) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh == mesh


def refuse_indivisible(name: str, size: int, group: ProcessGroup) -> None:
    """Refuse a size that can't be cut into equal parts, one a rank.

    Raises:
        ValueError: It names the size and the group sizes that would do.
    """
    if size % group.size:
        raise ValueError(
            f"{name}={size} is not divisible by the group's {group.size} ranks; use a group of "
            f"{divisor_of(size)}"
        )
