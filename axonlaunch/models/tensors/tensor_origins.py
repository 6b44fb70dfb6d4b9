"""Traces tensor values through slices, concatenations and transpositions without reading them.

``OriginTensor`` replaces a tensor in torch's functions, so that code that converts weights shows
where each part comes from. Operations that do more than move boxes of numbers raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

Read = Callable[[str, tuple[slice, ...]], Tensor]


class CannotPlaceError(TypeError):
    """An operation that does more than move numbers."""


@dataclass(frozen=True)
class Piece:
    """A box of numbers from a source tensor.

    An example: columns 2 and 3 of a source [4, 6], transposed and placed at row 5 of the tensor,
    are at ``(5, 0)`` with shape ``(2, 4)``, from ``start=(0, 2)``, along ``(1, 0)``.

    Attributes:
        source: Name of the source.
        at: First index of the box in the tensor.
        shape: Shape of the box in the tensor.
        start: First index of the box in the source.
        along: Source dimension of each tensor dimension; None if the source lacks it.
    """

    source: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    start: tuple[int, ...]
    along: tuple[int | None, ...]

    def within(self, offsets: Sequence[int], lengths: Sequence[int]) -> Self | None:
        """Return the part in a region of the tensor, relative to that region; None if empty."""
        at, shape, start = [], [], list(self.start)
        for dim, (low, length) in enumerate(zip(offsets, lengths, strict=True)):
            first = max(low, self.at[dim])
            last = min(low + length, self.at[dim] + self.shape[dim])
            if first >= last:
                return None
            at.append(first - low)
            shape.append(last - first)
            if (source_dim := self.along[dim]) is not None:
                start[source_dim] += first - self.at[dim]
        return replace(self, at=tuple(at), shape=tuple(shape), start=tuple(start))

    def read(self, read: Read) -> Tensor:
        """Read the numbers, with dimensions in the tensor's order."""
        lengths = [1] * len(self.start)
        for dim, source_dim in enumerate(self.along):
            if source_dim is not None:
                lengths[source_dim] = self.shape[dim]
        slices = tuple(slice(s, s + n) for s, n in zip(self.start, lengths, strict=True))
        values = read(self.source, slices)
        order = [dim for dim in self.along if dim is not None]
        # Source dimensions that the tensor lacks have size 1 and come last.
        order += [dim for dim in range(len(self.start)) if dim not in order]
        return values.permute(order).reshape(self.shape)


@dataclass(frozen=True)
class OriginTensor:
    """A tensor composed of pieces of other tensors; replaces a tensor in torch functions.

    Attributes:
        shape: Shape of the tensor.
        pieces: Pieces that cover the tensor, each number once.
    """

    shape: torch.Size
    pieces: tuple[Piece, ...]

    @classmethod
    def full(cls, name: str, shape: Sequence[int]) -> Self:
        """Return a tensor that equals a source."""
        sizes, dims = tuple(shape), tuple(range(len(shape)))
        origin = (0,) * len(sizes)
        return cls(torch.Size(sizes), (Piece(name, origin, sizes, origin, dims),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources of all pieces."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))

    def read(
        self, read: Read, offsets: Sequence[int], lengths: Sequence[int], into: Tensor
    ) -> None:
        """Fill a tensor with a region of this one, piece by piece.

        Args:
            read: Reads a region of a source by name.
            offsets: First index of the region in each dimension.
            lengths: Size of the region in each dimension.
            into: Tensor [*lengths] to fill in place.
        """
        for piece in self.pieces:
            if (part := piece.within(offsets, lengths)) is not None:
                slices = tuple(slice(a, a + n) for a, n in zip(part.at, part.shape, strict=True))
                into[slices].copy_(part.read(read))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a torch function.

        Raises:
            CannotPlaceError: The function does more than move boxes of numbers.
        """
        del types
        if func not in _FUNCTIONS:
            raise CannotPlaceError(f"{func} does more than move numbers")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Return the size of a dimension."""
        return self.shape[dim]

    def contiguous(self) -> Self:
        """Return the tensor unchanged, because it has no strides."""
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple[OriginTensor, ...]:
        """Split along a dimension as ``torch.chunk`` does."""
        return _chunk(self, chunks, dim)

    def squeeze(self, dim: int) -> OriginTensor:
        """Remove a dimension of size 1."""
        dim %= self.ndim
        assert self.shape[dim] == 1
        pieces = [
            replace(
                piece,
                at=_without(piece.at, dim),
                shape=_without(piece.shape, dim),
                along=_without(piece.along, dim),
            )
            for piece in self.pieces
        ]
        return OriginTensor(torch.Size(_without(tuple(self.shape), dim)), tuple(pieces))

    @property
    def T(self) -> OriginTensor:  # noqa: N802 - torch's name
        """The transposed matrix."""
        return _transpose(self, 0, 1) if self.ndim == 2 else self

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


def _cat(tensors: Sequence[OriginTensor], dim: int = 0) -> OriginTensor:
    dim %= tensors[0].ndim
    pieces, end = [], 0
    for tensor in tensors:
        for piece in tensor.pieces:
            at = (*piece.at[:dim], piece.at[dim] + end, *piece.at[dim + 1 :])
            pieces.append(replace(piece, at=at))
        end += tensor.shape[dim]
    first = tensors[0].shape
    return OriginTensor(torch.Size([*first[:dim], end, *first[dim + 1 :]]), tuple(pieces))


def _stack(tensors: Sequence[OriginTensor], dim: int = 0) -> OriginTensor:
    dim %= tensors[0].ndim + 1
    wider = []
    for tensor in tensors:
        pieces = [
            replace(
                piece,
                at=_with(piece.at, dim, 0),
                shape=_with(piece.shape, dim, 1),
                along=_with(piece.along, dim, None),
            )
            for piece in tensor.pieces
        ]
        wider.append(OriginTensor(torch.Size(_with(tuple(tensor.shape), dim, 1)), tuple(pieces)))
    return _cat(wider, dim)


def _transpose(tensor: OriginTensor, dim0: int, dim1: int) -> OriginTensor:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def swap(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[dim] for dim in order)

    pieces = [
        replace(piece, at=swap(piece.at), shape=swap(piece.shape), along=swap(piece.along))
        for piece in tensor.pieces
    ]
    return OriginTensor(torch.Size(swap(tensor.shape)), tuple(pieces))


def _split(
    tensor: OriginTensor, sizes: int | Sequence[int], dim: int = 0
) -> tuple[OriginTensor, ...]:
    dim %= tensor.ndim
    total = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    parts, start = [], 0
    for size in sizes:
        offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
        offsets[dim], lengths[dim] = start, size
        pieces = [piece.within(offsets, lengths) for piece in tensor.pieces]
        parts.append(OriginTensor(torch.Size(lengths), tuple(p for p in pieces if p is not None)))
        start += size
    return tuple(parts)


def _chunk(tensor: OriginTensor, chunks: int, dim: int = 0) -> tuple[OriginTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _with(values: Sequence[Any], dim: int, value: Any) -> tuple[Any, ...]:
    return (*values[:dim], value, *values[dim:])


def _without(values: Sequence[Any], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.transpose: _transpose,
    torch.chunk: _chunk,
    torch.split: _split,
}
