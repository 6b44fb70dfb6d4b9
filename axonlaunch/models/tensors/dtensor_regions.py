"""Determines which parts of a full tensor a rank holds, and gathers full tensors.

DTensor's placements are evaluated here; parts that are not boxes of the full tensor are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from axonlaunch.comm.mesh import local_part
from axonlaunch.models.torch_internals import DTensorSpec, StridedShard, TensorMeta, local_tensor

Interval = tuple[int, int]
"""Offset and length."""


@dataclass(frozen=True)
class Box:
    """A rectangular region of a full tensor that a rank holds.

    Attributes:
        region: ``(offset, length)`` in each dimension of the full tensor.
        offsets: First index of the box in the rank's local tensor.
    """

    region: tuple[Interval, ...]
    offsets: tuple[int, ...]

    def view(self, local: Tensor) -> Tensor:
        """Return a view of the box in the local tensor."""
        for dim, (start, (_, length)) in enumerate(zip(self.offsets, self.region, strict=True)):
            if (start, length) != (0, local.shape[dim]):
                local = local.narrow(dim, start, length)
        return local


def packed_placement(dim: int, *, pieces: int) -> Placement:
    """Return the placement of a dimension that consists of ``pieces`` equal tensors.

    Each piece is sharded separately: if gate and up projections share one weight, each rank has its
    shard of both.
    """
    return StridedShard(dim, split_factor=pieces)


def needs_boxes(tensor: Tensor) -> bool:
    """Return whether torch can't find a rank's part: it has several boxes, or is uneven."""
    if not isinstance(tensor, DTensor):
        return False
    return any(shard.pieces > 1 for shard in _shards(tensor)) or _is_sharded_unevenly(tensor)


def local_boxes(tensor: Tensor) -> list[Box]:
    """Return the boxes of the full tensor that this rank holds.

    Raises:
        NotImplementedError: The placements don't split the tensor into boxes.
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
    """Return a DTensor that uses a local part without copying it.

    ``DTensor.from_local`` copies a part in host memory to the device of the mesh. An offloaded part
    would be on the device again, and later writes would go to the copy.

    Args:
        local: This rank's part.
        placements: Placement along each mesh axis.
        shape: Shape of the full tensor.
        stride: Strides of the full tensor.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local.detach(), spec, requires_grad=False)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank; all ranks of its mesh must call this.

    The axis that was sharded last is gathered first, which torch can do in one operation.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if needs_boxes(tensor):  # torch 2.11 can't gather several boxes
        return _sum_of_boxes(tensor)
    for shard in reversed(_shards(tensor)):
        placements = list(tensor.placements)
        placements[shard.axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def squares_along(
    tensor: Tensor, *, dim: int, read: Callable[[Tensor], Tensor] = lambda part: part
) -> Tensor:
    """Return sums of squares of a full matrix along a dimension, on every rank.

    All ranks of the mesh must call this; only the sums are communicated. The result is in fp32, or
    in fp64 for an fp64 matrix.

    Args:
        tensor: The matrix, or a tensor that stores it with an equal number of columns per index of
            its second dimension.
        dim: Dimension of the sums.
        read: Returns the matrix that a part of the tensor stores.
    """
    local = local_part(tensor)
    parts = [(box, read(box.view(local))) for box in local_boxes(tensor)]
    dtype = torch.promote_types(parts[0][1].dtype, torch.float32)
    columns = parts[0][1].shape[1] // max(1, parts[0][0].region[1][1])
    unit = 1 if dim else columns
    total = torch.zeros(tensor.shape[1 - dim] * unit, dtype=dtype, device=local.device)
    for box, part in parts:
        start, length = (number * unit for number in box.region[1 - dim])
        norms = torch.linalg.vector_norm(part, dim=dim, dtype=dtype)
        total[start : start + length] += norms.square()
    if not isinstance(tensor, DTensor):
        return total
    # Offloaded tensors are not on the device that is used for communication.
    summed = total.to(tensor.device_mesh.device_type)
    for shard in _shards(tensor):
        summed = sum_over(summed, ProcessGroup.from_torch(tensor.device_mesh.get_group(shard.axis)))
    return summed.to(total.device)


@torch.no_grad()
def held_boxes(tensor: Tensor) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Return copies of a rank's boxes of a tensor, each with its slices in the full tensor.

    All ranks of its mesh must call this. If the part does not consist of boxes, each rank returns
    the full tensor.
    """
    try:
        boxes = local_boxes(tensor)
    except NotImplementedError:
        return [((...,), full_tensor(tensor.detach()).clone())]
    local = local_part(tensor.detach())
    return [
        (
            tuple(slice(start, start + length) for start, length in box.region),
            box.view(local).clone(),
        )
        for box in boxes
        if local.numel()
    ]


def _is_sharded_unevenly(tensor: DTensor) -> bool:
    """Return whether tensor and FSDP axes shard a dimension with a size that they don't divide.

    FSDP shards the tensor axis's parts. torch gathers as if the full tensor had been sharded from
    left to right, which is different for uneven parts: with 7 rows, two tensor ranks and four data
    ranks, rows would be swapped.
    """
    shards = _shards(tensor)
    for dim in {
        shard.dim for shard in shards if isinstance(tensor.placements[shard.axis], StridedShard)
    }:
        parts = [
            shard.pieces * tensor.device_mesh.size(shard.axis)
            for shard in shards
            if shard.dim == dim
        ]
        if tensor.shape[dim] % math.prod(parts):
            return True
    return False


def _sum_of_boxes(tensor: DTensor) -> Tensor:
    """Return the full tensor: each rank writes its boxes into zeros, which are then summed."""
    local = tensor.to_local().detach()
    total = local.new_zeros(tensor.shape)
    for box in local_boxes(tensor):
        Box(box.region, tuple(start for start, _ in box.region)).view(total).copy_(box.view(local))
    for shard in _shards(tensor):
        group = ProcessGroup.from_torch(tensor.device_mesh.get_group(shard.axis))
        total = sum_over(total, group)
    return total


@dataclass(frozen=True)
class _AxisShard:
    """How a mesh axis shards a dimension.

    Attributes:
        axis: Mesh axis.
        dim: Dimension that is sharded.
        pieces: Number of equal pieces of the dimension, each of them sharded.
    """

    axis: int
    dim: int
    pieces: int = 1


def _local_intervals(tensor: Tensor) -> list[list[Interval]]:
    """Return this rank's intervals in each dimension of the full tensor, in order."""
    intervals = [[(0, size)] for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return intervals
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return [[(0, 0)] for _ in intervals]
    for shard in _shards(tensor):
        parts, index = mesh.size(shard.axis), coordinate[shard.axis]
        intervals_so_far = intervals[shard.dim]
        pieces = (
            [intervals_so_far]
            if shard.pieces == 1
            else [[interval] for interval in _pieces(intervals_so_far[0], shard.pieces)]
        )
        intervals[shard.dim] = [
            interval for piece in pieces for interval in _chunk(piece, parts=parts, index=index)
        ]
    local = local_tensor(tensor).shape
    if tuple(sum(length for _, length in interval) for interval in intervals) != tuple(local):
        raise NotImplementedError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} is sharded in "
            "an unusual way; use degrees that divide its sizes"
        )
    return intervals


def _shards(tensor: DTensor) -> list[_AxisShard]:
    """Return the shards of a tensor by axis, in the order in which they were made.

    Axes shard from left to right. A strided shard is made after the shards to its right, because
    FSDP's data axis is to the left of the tensor axis and shards the tensor axis's parts. A strided
    shard without a shard to its right splits each of the packed pieces of a dimension. A shard to
    the left of such a strided shard is also made after it, because torch 2.11's FSDP does not
    recognize a packed dimension as sharded.
    """
    plain: list[_AxisShard] = []
    strided: list[_AxisShard] = []
    right: dict[int, int] = {}  # number of parts of each dimension made by the axes to the right
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[axis]
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, StridedShard):
            factor, right_parts = int(placement.split_factor), right.get(placement.dim, 1)
            if factor == right_parts:
                strided.append(_AxisShard(axis, placement.dim))
            elif right_parts == 1:
                plain.insert(0, _AxisShard(axis, placement.dim, factor))
            else:
                raise NotImplementedError(f"{placement} does not follow the shards to its right")
        elif isinstance(placement, Shard):
            shard = _AxisShard(axis, placement.dim)
            if any(other.pieces > 1 for other in plain if other.dim == shard.dim):
                strided.append(shard)
            else:
                plain.insert(0, shard)
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
    """Cut as ``torch.chunk`` does: into equal parts, rounded up, so the last may be short or empty.

    Intervals count as consecutive. An empty part is one empty interval.
    """
    total = sum(length for _, length in intervals)
    size = -(-total // parts)
    start, stop = min(index * size, total), min((index + 1) * size, total)
    position, found = 0, False
    for offset, length in intervals:
        low, high = max(start, position), min(stop, position + length)
        if low < high:
            found = True
            yield offset + low - position, high - low
        position += length
    if not found:
        yield intervals[-1][0] + intervals[-1][1], 0


def _starts(intervals: list[Interval]) -> list[int]:
    """Return where each interval begins if they are stored consecutively."""
    return [sum(length for _, length in intervals[:number]) for number in range(len(intervals))]
