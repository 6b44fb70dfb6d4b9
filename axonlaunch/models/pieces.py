"""Where the values of a tensor are among others: sliced, put together and turned, none of it read.

``Laid`` stands for a tensor in torch's own functions, so that code which converts weights can be
asked where each part comes from. What it does beside moving whole boxes of numbers is refused.
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
    """An operation does more than move numbers."""


@dataclass(frozen=True)
class Piece:
    """A box of a source's numbers.

    A source [4, 6] turned, of which columns 2 and 3 begin at row 5 of the tensor, is at ``(5, 0)``
    with shape ``(2, 4)``, from ``(0, 2)``, along ``(1, 0)``.

    Attributes:
        source: Its name.
        at: Where the box begins in the tensor.
        shape: Of the box, as the tensor has it.
        start: Where it begins in the source.
        along: For each dim of the tensor the source's; None: the source lacks it.
    """

    source: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    start: tuple[int, ...]
    along: tuple[int | None, ...]

    def within(self, offsets: Sequence[int], lengths: Sequence[int]) -> Self | None:
        """Return what a region of the tensor has of it, placed in that region; None: nothing."""
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
        """Return its numbers, in the tensor's order of dims."""
        lengths = [1] * len(self.start)
        for dim, source_dim in enumerate(self.along):
            if source_dim is not None:
                lengths[source_dim] = self.shape[dim]
        slices = tuple(slice(s, s + n) for s, n in zip(self.start, lengths, strict=True))
        values = read(self.source, slices)
        order = [dim for dim in self.along if dim is not None]
        # A dim of the source that the tensor lacks is of one number, and last in the order.
        order += [dim for dim in range(len(self.start)) if dim not in order]
        return values.permute(order).reshape(self.shape)


@dataclass(frozen=True)
class Laid:
    """A tensor made of pieces of others, in place of one in functions of torch.

    Attributes:
        shape: Its own.
        pieces: Which cover it, each number once.
    """

    shape: torch.Size
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Self:
        """Return a tensor that is a source as it is."""
        sizes, dims = tuple(shape), tuple(range(len(shape)))
        origin = (0,) * len(sizes)
        return cls(torch.Size(sizes), (Piece(name, origin, sizes, origin, dims),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of what it is made of."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))

    def read(
        self, read: Read, offsets: Sequence[int], lengths: Sequence[int], into: Tensor
    ) -> None:
        """Fill a tensor with a region of this one, a piece at a time.

        Args:
            read: Reads a region of a source, by its name.
            offsets: First index of the region in each dim.
            lengths: How many it has of each.
            into: [*lengths]; written in place.
        """
        for piece in self.pieces:
            if (inside := piece.within(offsets, lengths)) is not None:
                spot = tuple(slice(a, a + n) for a, n in zip(inside.at, inside.shape, strict=True))
                into[spot].copy_(inside.read(read))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what a function of torch would do to the tensor.

        Raises:
            CannotPlaceError: It does more than move boxes of numbers.
        """
        del types
        if func not in _FUNCTIONS:
            raise CannotPlaceError(f"{func} does more than move numbers")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Return the size of a dim."""
        return self.shape[dim]

    def contiguous(self) -> Self:
        """Return it as it is: it has no strides."""
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Laid, ...]:
        """Return parts along a dim, as ``torch.chunk``."""
        return _chunk(self, chunks, dim)

    def squeeze(self, dim: int) -> Laid:
        """Return it without a dim of one."""
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
        return Laid(torch.Size(_without(tuple(self.shape), dim)), tuple(pieces))

    @property
    def T(self) -> Laid:  # noqa: N802 - as torch's
        """Return it turned."""
        return _transpose(self, 0, 1) if self.ndim == 2 else self

    def numel(self) -> int:
        """Return how many numbers it has."""
        return prod(self.shape)


def _cat(tensors: Sequence[Laid], dim: int = 0) -> Laid:
    dim %= tensors[0].ndim
    pieces, end = [], 0
    for tensor in tensors:
        for piece in tensor.pieces:
            at = (*piece.at[:dim], piece.at[dim] + end, *piece.at[dim + 1 :])
            pieces.append(replace(piece, at=at))
        end += tensor.shape[dim]
    first = tensors[0].shape
    return Laid(torch.Size([*first[:dim], end, *first[dim + 1 :]]), tuple(pieces))


def _stack(tensors: Sequence[Laid], dim: int = 0) -> Laid:
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
        wider.append(Laid(torch.Size(_with(tuple(tensor.shape), dim, 1)), tuple(pieces)))
    return _cat(wider, dim)


def _transpose(tensor: Laid, dim0: int, dim1: int) -> Laid:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def turned(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[dim] for dim in order)

    pieces = [
        replace(piece, at=turned(piece.at), shape=turned(piece.shape), along=turned(piece.along))
        for piece in tensor.pieces
    ]
    return Laid(torch.Size(turned(tensor.shape)), tuple(pieces))


def _split(tensor: Laid, sizes: int | Sequence[int], dim: int = 0) -> tuple[Laid, ...]:
    dim %= tensor.ndim
    total = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    tensors, start = [], 0
    for size in sizes:
        offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
        offsets[dim], lengths[dim] = start, size
        pieces = [piece.within(offsets, lengths) for piece in tensor.pieces]
        tensors.append(Laid(torch.Size(lengths), tuple(p for p in pieces if p is not None)))
        start += size
    return tuple(tensors)


def _chunk(tensor: Laid, chunks: int, dim: int = 0) -> tuple[Laid, ...]:
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
