"""Temporarily gathers sharded matrices so that each is complete on one rank, its owner.

Every rank then works on its share of the matrices, and no rank holds all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Division:
    """One mesh axis that shards a dim of a tensor, in the way of torch.chunk.

    Attributes:
        axis: Axis of the mesh.
        dim: Dim of the tensor.
        length: Length of that dim before this division, on this rank.
    """

    axis: int
    dim: int
    length: int

    def lengths(self, mesh: DeviceMesh) -> list[int]:
        """Return the length of each rank's part; may be shorter or 0 on the last ranks."""
        step = -(-self.length // mesh.size(self.axis))
        ends = [min(step * boundary, self.length) for boundary in range(mesh.size(self.axis) + 1)]
        return [stop - start for start, stop in pairwise(ends)]


def divisions(tensor: DTensor) -> list[Division]:
    """Return the divisions of a tensor, in the order in which they were applied.

    A data axis shards each part that the tensor axis has left. Its placement is then a strided
    shard: the later division, although its mesh axis comes first.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    sharded = [
        (hasattr(placement, "split_factor"), axis, placement.dim)
        for axis, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim") and mesh.size(axis) > 1
    ]
    lengths = list(tensor.shape)
    from_first = []
    for _, axis, dim in sorted(sharded):
        division = Division(axis, dim, lengths[dim])
        lengths[dim] = division.lengths(mesh)[coordinate[axis]]
        from_first.append(division)
    return from_first


def divisions_of_matrix(tensor: Tensor) -> list[Division]:
    """Return the divisions of a matrix, or of each matrix of a stack [n, rows, columns].

    Ranks that share a stack by its first dim hold different matrices, each of them complete.
    """
    if not isinstance(tensor, DTensor):
        return []
    first = tensor.ndim - 2
    return [replace(each, dim=each.dim - first) for each in divisions(tensor) if each.dim >= first]


def indices_by_axes(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors whose matrices are sharded over the same axes of a mesh."""
    by_division: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key: object = None
        if isinstance(tensor, DTensor) and (cuts := divisions_of_matrix(tensor)):
            key = (tensor.device_mesh, tuple(division.axis for division in cuts))
        by_division.setdefault(key, []).append(index)
    yield from by_division.values()


class OwnedMatrices:
    """Gathers each of several matrices on one rank, and scatters them again.

    If four ranks share eight matrices, each rank gets two. With two axes the exchange is done axis
    by axis, starting with the last division: the ranks of the tensor axis distribute the matrices
    among them, then the ranks of the data axis distribute each of those shares.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        divided: Sequence[Sequence[Division]],
        *,
        costs: Sequence[float],
    ) -> None:
        """Prepare the exchange.

        Args:
            mesh: Mesh of the matrices.
            divided: Divisions of each matrix, over the same axes.
            costs: Cost of processing each full matrix, used to balance the ranks.
        """
        self._mesh = mesh
        self._costs = costs
        self._divisions = [each[::-1] for each in divided]
        self._shapes: list[dict[int, torch.Size]] = []
        self._empty = torch.empty(0)

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the full matrices that this rank owns, by index, from the parts of all ranks."""
        tensors = dict(enumerate(parts))
        self._empty = parts[0].new_empty(0)
        self._shapes.clear()
        for turn, axis in enumerate(self._axes()):
            self._shapes.append({index: part.shape for index, part in tensors.items()})
            owned, mine = self._assign_owners(tensors, axis), self._mesh.get_local_rank(axis)
            received = self._exchange(
                axis,
                [[tensors[index] for index in indices] for indices in owned],
                [
                    [self._shape_on(rank, index, turn) for index in owned[mine]]
                    for rank in range(len(owned))
                ],
            )
            tensors = {
                index: torch.cat([of_rank[n] for of_rank in received], self._dim(index, turn))
                for n, index in enumerate(owned[mine])
            }
        return tensors

    def scatter(self, full_tensors: Mapping[int, Tensor]) -> list[Tensor]:
        """Return this rank's part of every matrix, from the full matrices of all owners."""
        tensors = dict(full_tensors)
        for turn, axis in reversed([*enumerate(self._axes())]):
            shapes = self._shapes[turn]
            owned, mine = self._assign_owners(shapes, axis), self._mesh.get_local_rank(axis)
            parts = {
                index: tensors[index].split(self._lengths(index, turn), self._dim(index, turn))
                for index in owned[mine]
            }
            received = self._exchange(
                axis,
                [[parts[index][rank] for index in owned[mine]] for rank in range(len(owned))],
                [[shapes[index] for index in indices] for indices in owned],
            )
            tensors = {
                index: part
                for indices, of_rank in zip(owned, received, strict=True)
                for index, part in zip(indices, of_rank, strict=True)
            }
        return [tensors[index] for index in range(len(self._divisions))]

    def _axes(self) -> list[int]:
        return [division.axis for division in self._divisions[0]]

    def _dim(self, index: int, turn: int) -> int:
        return self._divisions[index][turn].dim

    def _lengths(self, index: int, turn: int) -> list[int]:
        return self._divisions[index][turn].lengths(self._mesh)

    def _shape_on(self, rank: int, index: int, turn: int) -> torch.Size:
        """Return the shape of another rank's part; it differs from this rank's in one dim."""
        shape = list(self._shapes[turn][index])
        shape[self._dim(index, turn)] = self._lengths(index, turn)[rank]
        return torch.Size(shape)

    def _assign_owners(self, indices: Iterable[int], axis: int) -> list[list[int]]:
        """Assign matrices to ranks of an axis: the costliest first, to the least loaded rank."""
        owned: list[list[int]] = [[] for _ in range(self._mesh.size(axis))]
        work = [0.0] * len(owned)
        for index in sorted(indices, key=lambda index: (-self._costs[index], index)):
            rank = work.index(min(work))
            owned[rank].append(index)
            work[rank] += self._costs[index]
        return owned

    def _exchange(
        self, axis: int, sent: list[list[Tensor]], shapes: list[list[torch.Size]]
    ) -> list[list[Tensor]]:
        """Send tensors to each rank of an axis; return the received ones, of the given shapes."""
        out = [torch.cat([t.reshape(-1) for t in to]) if to else None for to in sent]
        message = torch.cat([self._empty if part is None else part for part in out])
        sizes = [[shape.numel() for shape in of_rank] for of_rank in shapes]
        received = message.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            message,
            [sum(of_rank) for of_rank in sizes],
            [0 if part is None else part.numel() for part in out],
            group=self._mesh.get_group(axis),
        )
        parts = iter(received.split([size for of_rank in sizes for size in of_rank]))
        return [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]


@contextmanager
def only_plain_tensors(optimizer: Optimizer, *, most_dims: float = math.inf) -> Iterator[None]:
    """Return a context in which torch's step updates only plain tensors.

    Args:
        optimizer: Optimizer with groups of plain tensors and DTensors.
        most_dims: Number of dims above which tensors are left out, too.
    """
    groups = optimizer.param_groups
    try:
        optimizer.param_groups = [
            {
                **group,
                "params": [
                    p for p in group["params"] if p.ndim <= most_dims and not isinstance(p, DTensor)
                ],
            }
            for group in groups
        ]
        yield
    finally:
        optimizer.param_groups = groups
