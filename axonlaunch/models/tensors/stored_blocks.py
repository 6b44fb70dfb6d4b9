"""Reads matrices that bitsandbytes saved as NF4, in its format or in that of ``packed_blocks``.

A saved matrix consists of its codes, the scales of its blocks, and JSON with its shape. With double
quantization, the scales are 8-bit codes with scales of their own.

Source: bitsandbytes, ``functional.py``, ``QuantState.as_dict``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from axonlaunch.models.tensors.packed_blocks import BLOCK, BLOCK_FORMATS
from axonlaunch.models.tensors.tensor_origins import Read

NF4 = BLOCK_FORMATS["nf4"]
_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)
_CHUNK_BYTES = 16 << 20
"""Bytes of codes that are read at a time."""


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix in a file, quantized to NF4 in blocks of 64 values of a row.

    Attributes:
        name: Name of the tensor with the codes.
        shape: Shape [rows, columns] of the values.
        code_items: Elements of a row of codes, which may be saved with any dtype.
        nested: Block size and offset of the scales' 8-bit codes; None if scales are numbers.
    """

    name: str
    shape: tuple[int, int]
    code_items: int
    nested: tuple[int, float] | None

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape [rows, blocks, bytes] of the matrix in the format of ``packed_blocks``."""
        return NF4.packed_shape(self.shape)

    def values(self, read: Read, region: tuple[slice, ...]) -> Tensor:
        """Return the fp32 values of a region; an empty region means all.

        Args:
            read: Reads a region of a tensor in the file by name.
            region: Rows and columns.
        """
        rows, columns = region or (slice(0, self.shape[0]), slice(0, self.shape[1]))
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        packed = self._rows(read, rows.start, rows.stop)[:, first:last]
        values = NF4.dequantize(packed, torch.float32)
        return values[:, columns.start - first * BLOCK : columns.stop - first * BLOCK]

    def read_packed(
        self, read: Read, offsets: Sequence[int], lengths: Sequence[int], into: Tensor
    ) -> None:
        """Fill a tensor with a region of the matrix in the format of ``packed_blocks``.

        Args:
            read: Reads a region of a tensor in the file by name.
            offsets: First row and block, and byte 0.
            lengths: Number of rows, blocks and bytes.
            into: uint8 tensor [*lengths] to fill in place.
        """
        (first, block, _), (count, blocks, _) = offsets, lengths
        step = max(1, _CHUNK_BYTES // (self.shape[1] // 2))
        for start in range(0, count, step):
            stop = min(start + step, count)
            rows = self._rows(read, first + start, first + stop)
            into[start:stop].copy_(rows[:, block : block + blocks])

    def _rows(self, read: Read, start: int, stop: int) -> Tensor:
        """Return rows in the format of ``packed_blocks``, uint8 [rows, blocks, bytes]."""
        codes = read(self.name, (slice(start * self.code_items, stop * self.code_items),))
        width = self.shape[1] // BLOCK
        scales = self._scales(read, start * width, stop * width)
        shape = (stop - start, width)
        parts = [
            codes.contiguous().flatten().view(torch.uint8).view(*shape, NF4.code_bytes),
            scales.view(*shape, 1).view(torch.uint8),
        ]
        return torch.cat(parts, -1)

    def _scales(self, read: Read, start: int, stop: int) -> Tensor:
        """Return the scales of blocks, fp32 [blocks], computed as bitsandbytes does."""
        saved = read(f"{self.name}.absmax", (slice(start, stop),)).flatten()
        if self.nested is None:
            return saved.float()
        block, offset = self.nested
        values = read(f"{self.name}.nested_quant_map", ()).flatten()
        factors = read(f"{self.name}.nested_absmax", ()).flatten()
        scales = values[saved.long()] * factors[torch.arange(start, stop) // block]
        return scales + torch.tensor(offset)


def stored_blocks(
    shapes: Mapping[str, Sequence[int]], read: Callable[[str], Tensor]
) -> dict[str, StoredBlocks]:
    """Return the quantized matrices among the tensors of files.

    Args:
        shapes: Shapes of all tensors by name.
        read: Reads a full tensor by name.

    Raises:
        ValueError: The JSON of a matrix is invalid, contradicts the tensors, or describes blocks
            that can't be used; names the matrix.
    """
    names = [name.removesuffix(_STATE) for name in shapes if name.endswith(_STATE)]
    found = {}
    for name in names:
        try:
            found[name] = _stored_matrix(
                name, shapes, json.loads(bytes(read(f"{name}{_STATE}").tolist()))
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}" if type(error) is not ValueError else error
            raise ValueError(f"{name} can't be read as NF4: {reason}") from None
    return found


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the tensors that a quantized matrix may have besides its codes."""
    return tuple(f"{name}{part}" for part in _PARTS)


def _stored_matrix(name: str, shapes: Mapping[str, Sequence[int]], state: Any) -> StoredBlocks:
    """Return a matrix after a check of its description.

    Raises:
        ValueError: The description contradicts the tensors, or rows are not whole blocks.
    """
    if (block := state["blocksize"]) != BLOCK:
        raise ValueError(f"it has blocks of {block} values, and only {BLOCK} is supported")
    rows, columns = (int(size) for size in state["shape"])
    if columns % BLOCK:
        raise ValueError(f"its rows of {columns} values are not whole blocks of {BLOCK}")
    items, blocks = prod(shapes[name]), rows * columns // BLOCK
    if not items or items % rows or rows * columns // 2 % items:
        raise ValueError(f"{items} codes don't fit its shape {[rows, columns]}")
    if (scales := prod(shapes[f"{name}.absmax"])) != blocks:
        raise ValueError(f"it has {scales} scales for {blocks} blocks")
    nested = None
    if f"{name}.nested_absmax" in shapes:
        nested = int(state["nested_blocksize"]), float(state["nested_offset"])
        if nested[0] < 1 or prod(shapes[f"{name}.nested_absmax"]) != -(-blocks // nested[0]):
            raise ValueError(f"its nested_absmax does not fit blocks of {nested[0]} scales")
        if prod(shapes[f"{name}.nested_quant_map"]) != 256:
            raise ValueError("its nested_quant_map does not have 256 values")
    return StoredBlocks(name, (rows, columns), items // rows, nested)
