"""Which parts of a whole tensor this rank holds, and the whole from the parts.

It reads DTensor's placements; a part that is not made of boxes of the whole is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import sum_over
from axonlaunch.models.torch_internals import DTensorSpec, StridedShard, TensorMeta, local_tensor

Interval = tuple[int, int]
"""Offset and length."""


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor that a rank holds.

    Attributes:
        region: ``(offset, length)`` in each dim of the whole.
        offsets: Where it begins in what the rank holds.
    """

    region: tuple[Interval, ...]
    offsets: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """Return a view of it in what the rank holds."""
        for dim, (start, (_, length)) in enumerate(zip(self.offsets, self.region, strict=True)):
            if (start, length) != (0, local.shape[dim]):
                local = local.narrow(dim, start, length)
        return local


def packed_placement(dim: int, *, pieces: int) -> Placement:
    """Return the placement of a dim that is ``pieces`` equal tensors one behind the other.

    Each of them is cut: of gate and up projections in one weight a rank has its part of both.
    """
    return StridedShard(dim, split_factor=pieces)


def needs_boxes(tensor: Tensor) -> bool:
    """Say whether torch can't find a rank's part of a tensor: several boxes, or an uneven one."""
    if not isinstance(tensor, DTensor):
        return False
    return any(cut.pieces > 1 for cut in _cuts(tensor)) or _is_cut_unevenly(tensor)


def local_boxes(tensor: Tensor) -> list[Box]:
    """Return the boxes of the whole that this rank holds.

    Raises:
        NotImplementedError: The placements don't cut the tensor into boxes.
    """
    intervals = _local_intervals(tensor)
    offsets = product(*map(_starts, intervals))
    return [Box(*box) for box in zip(product(*intervals), offsets, strict=True)]


def dtensor_of(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """Return a DTensor of a part that stays where it is.

    ``DTensor.from_local`` copies a part in host memory to the device of the mesh: what is offloaded
    would be on the device again, and what is then written to it would be written to the copy.

    Args:
        local: This rank's part.
        mesh: Its axes.
        placements: What divides the whole along each.
        shape: Of the whole.
        stride: Of the whole.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local.detach(), spec, requires_grad=False)


def local_region(tensor: Tensor) -> list[Interval]:
    """Return ``(offset, length)`` of this rank's part in each dim of the whole.

    Raises:
        NotImplementedError: The placements don't make it a box.
    """
    boxes = local_boxes(tensor)
    if len(boxes) != 1:
        raise NotImplementedError(f"this rank holds {len(boxes)} boxes of {tuple(tensor.shape)}")
    return list(boxes[0].region)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor on every rank; all ranks of its mesh call this.

    The axis that was cut last is gathered first, which torch can do in one piece.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if needs_boxes(tensor):  # torch 2.11 gathers none of several boxes
        return _sum_of_boxes(tensor)
    for cut in reversed(_cuts(tensor)):
        placements = list(tensor.placements)
        placements[cut.axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def squares_along(tensor: Tensor, *, dim: int) -> Tensor:
    """Return the sums of the squares of a whole matrix along a dim, on every rank, in fp32.

    All ranks of its mesh call this; the sums alone are communicated. fp64 stays what it is.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    dtype = torch.promote_types(local.dtype, torch.float32)
    total = torch.zeros(tensor.shape[1 - dim], dtype=dtype, device=local.device)
    for box in local_boxes(tensor):
        start, length = box.region[1 - dim]
        norms = torch.linalg.vector_norm(box.of(local), dim=dim, dtype=dtype)
        total[start : start + length] += norms.square()
    if not isinstance(tensor, DTensor):
        return total
    # What is offloaded lies beside the device that its ranks communicate from.
    summed = total.to(tensor.device_mesh.device_type)
    for cut in _cuts(tensor):
        summed = sum_over(summed, ProcessGroup.from_torch(tensor.device_mesh.get_group(cut.axis)))
    return summed.to(total.device)


@torch.no_grad()
def held_boxes(tensor: Tensor) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Return copies of what a rank holds of a tensor, each with its place in the whole.

    All ranks of its mesh call this: where there are no boxes, each has the whole.
    """
    try:
        boxes = local_boxes(tensor)
    except NotImplementedError:
        return [((...,), whole(tensor.detach()).clone())]
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return [
        (tuple(slice(start, start + length) for start, length in box.region), box.of(local).clone())
        for box in boxes
        if local.numel()
    ]


def _is_cut_unevenly(tensor: DTensor) -> bool:
    """Say whether FSDP cut what the tensor axis left of a size that they don't divide.

    torch cuts the whole from left to right, which comes to other parts there: of 7 rows that two
    tensor ranks and four data ranks have, it puts other rows in their place.
    """
    cuts = _cuts(tensor)
    for dim in {cut.dim for cut in cuts if isinstance(tensor.placements[cut.axis], StridedShard)}:
        parts = [cut.pieces * tensor.device_mesh.size(cut.axis) for cut in cuts if cut.dim == dim]
        if tensor.shape[dim] % math.prod(parts):
            return True
    return False


def _sum_of_boxes(tensor: DTensor) -> Tensor:
    """Return the whole: each rank puts its boxes into zeros, and the ranks' are summed."""
    local = tensor.to_local().detach()
    total = local.new_zeros(tensor.shape)
    for box in local_boxes(tensor):
        Box(box.region, tuple(start for start, _ in box.region)).of(total).copy_(box.of(local))
    for cut in _cuts(tensor):
        group = ProcessGroup.from_torch(tensor.device_mesh.get_group(cut.axis))
        total = sum_over(total, group)
    return total


@dataclass(frozen=True)
class _Cut:
    """What a mesh axis does to a dim.

    Attributes:
        axis: Of the mesh.
        dim: Which it cuts.
        pieces: Equal ones of the dim, each of which is cut.
    """

    axis: int
    dim: int
    pieces: int = 1


def _local_intervals(tensor: Tensor) -> list[list[Interval]]:
    """Return what of each dim of the whole this rank holds, in its order."""
    intervals = [[(0, size)] for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return intervals
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return [[(0, 0)] for _ in intervals]
    for cut in _cuts(tensor):
        parts, index = mesh.size(cut.axis), coordinate[cut.axis]
        before = intervals[cut.dim]
        each = (
            [before]
            if cut.pieces == 1
            else [[interval] for interval in _pieces(before[0], cut.pieces)]
        )
        intervals[cut.dim] = [
            interval for piece in each for interval in _chunk(piece, parts=parts, index=index)
        ]
    local = local_tensor(tensor).shape
    if tuple(sum(length for _, length in interval) for interval in intervals) != tuple(local):
        raise NotImplementedError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} is cut in an "
            "unusual way; use degrees that divide its sizes"
        )
    return intervals


def _cuts(tensor: DTensor) -> list[_Cut]:
    """Return what cuts a tensor, in the order in which it was cut.

    Shards cut from left to right, except that a strided one came after the shards to its right:
    FSDP's data axis stands left of the tensor axis and cuts what that has left. A strided one with
    no shard to its right cuts each of the pieces that are packed in a dim; a shard to the left of
    such a one came after it too: torch 2.11's FSDP does not take a packed dim for a divided one.
    """
    plain: list[_Cut] = []
    strided: list[_Cut] = []
    right: dict[int, int] = {}  # how many parts the axes to the right make of a dim
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[axis]
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, StridedShard):
            factor, after = int(placement.split_factor), right.get(placement.dim, 1)
            if factor == after:
                strided.append(_Cut(axis, placement.dim))
            elif after == 1:
                plain.insert(0, _Cut(axis, placement.dim, factor))
            else:
                raise NotImplementedError(f"{placement} does not follow the shards to its right")
        elif isinstance(placement, Shard):
            cut = _Cut(axis, placement.dim)
            if any(other.pieces > 1 for other in plain if other.dim == cut.dim):
                strided.append(cut)
            else:
                plain.insert(0, cut)
        else:
            raise NotImplementedError(f"a parameter can't be placed as {placement}")
        parts = tensor.device_mesh.size(axis)
        right[placement.dim] = right.get(placement.dim, 1) * parts
    return plain + strided


def _pieces(interval: Interval, count: int) -> list[Interval]:
    offset, length = interval
    size = length // count
    return [(offset + number * size, size) for number in range(count)]


def _chunk(intervals: list[Interval], *, parts: int, index: int) -> Iterator[Interval]:
    """Cut as ``torch.chunk`` does: equal parts, rounded up, so the last may be short or empty.

    Intervals count as one behind the other. What is empty is one empty interval.
    """
    total = sum(length for _, length in intervals)
    size = -(-total // parts)
    start, stop = min(index * size, total), min((index + 1) * size, total)
    seen, inside = 0, False
    for offset, length in intervals:
        low, high = max(start, seen), min(stop, seen + length)
        if low < high:
            inside = True
            yield offset + low - seen, high - low
        seen += length
    if not inside:
        yield intervals[-1][0] + intervals[-1][1], 0


def _starts(intervals: list[Interval]) -> list[int]:
    """Return where each interval begins when they lie one behind the other."""
    return [sum(length for _, length in intervals[:number]) for number in range(len(intervals))]
