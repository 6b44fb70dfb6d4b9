"""Which part of a whole tensor this rank holds, and the whole from the parts.

It reads DTensor's placements; a part that is no box of the whole is refused.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local_region(tensor: Tensor) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of this rank's part in each dim of the whole.

    Raises:
        NotImplementedError: The placements don't cut the tensor into boxes.
    """
    region = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return region
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [(0, 0) for _ in region]
    for axis, dim in _cuts(tensor):
        region[dim] = _chunk(*region[dim], parts=mesh.size(axis), index=coordinate[axis])
    if tuple(length for _, length in region) != tuple(tensor.to_local().shape):
        raise NotImplementedError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {placements} is cut in an "
            "unusual way; use degrees that divide its sizes"
        )
    return region


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor on every rank; all ranks of its mesh call this.

    The axis that was cut last is gathered first, which torch can do in one piece.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    for axis, _ in reversed(_cuts(tensor)):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def _cuts(tensor: DTensor) -> list[tuple[int, int]]:
    """Return ``(mesh axis, dim that it cuts)``, in the order in which they were cut.

    Shards cut from left to right, except that a strided one came after the shards to its right:
    FSDP's data axis stands left of the tensor axis and cuts what that has left.
    """
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    right: dict[int, int] = {}  # how many parts the axes to the right make of a dim
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[axis]
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            if placement.split_factor != right.get(placement.dim, 1):
                raise NotImplementedError(f"{placement} does not follow the shards to its right")
            strided.append((axis, placement.dim))
        elif isinstance(placement, Shard):
            plain.insert(0, (axis, placement.dim))
        else:
            raise NotImplementedError(f"a parameter can't be placed as {placement}")
        parts = tensor.device_mesh.size(axis)
        right[placement.dim] = right.get(placement.dim, 1) * parts
    return plain + strided


def _chunk(offset: int, length: int, *, parts: int, index: int) -> tuple[int, int]:
    """Cut as ``torch.chunk`` does: equal parts, rounded up, so the last may be short or empty."""
    size = -(-length // parts)
    start, stop = min(index * size, length), min((index + 1) * size, length)
    return offset + start, stop - start
