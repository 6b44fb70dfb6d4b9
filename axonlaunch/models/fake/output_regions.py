"""Finds which part of a full output a rank's micro-batch is: samples, positions, features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from axonlaunch.config.consistency.layout import Layout
from axonlaunch.models.adapters.lora_matrix import LoraMatrix


@dataclass(frozen=True)
class MicroBatchPlace:
    """A micro-batch of a rank.

    Attributes:
        layout: Layout of the run.
        rank: Global rank.
        number: Index among the rank's micro-batches.
    """

    layout: Layout
    rank: int
    number: int

    @property
    def first_row(self) -> int:
        """Index of its first sample in the global batch."""
        layout = self.layout
        previous = layout.data_shard(self.rank) * layout.micro_batches + self.number
        return previous * layout.micro_batch_size


def gives_partial_sums(module: nn.Module) -> bool:
    """Return whether a rank's output of this module must be summed over ranks."""
    return isinstance(module, LoraMatrix) and module.gives_partial_sums


def gets_partial_gradients(module: nn.Module) -> bool:
    """Return whether a rank's gradient of the output must be summed over ranks."""
    return isinstance(module, LoraMatrix) and module.gets_partial_gradients


def join_outputs(calls: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """Return the reference model's output for the whole batch; None if it can't be determined.

    Args:
        calls: Outputs, one for each forward.
        layout: Layout that the reference model is compared with.
    """
    if not calls or any(call.ndim < 2 or call.shape[1:] != calls[0].shape[1:] for call in calls):
        return None
    if sum(map(len, calls)) == _samples(layout):
        return torch.cat([*calls]) if len(calls) > 1 else calls[0]
    is_of_positions = calls[0].ndim == 2 or len(calls[0]) == 1
    return calls[0] if len(calls) == 1 and is_of_positions else None


def region(
    full: Sequence[int],
    part: Sequence[int],
    micro_batch: MicroBatchPlace,
    *,
    pieces: int = 1,
    of_samples: bool = False,
) -> tuple[Tensor, ...] | None:
    """Return the index in each dimension that selects a rank's micro-batch from a full output.

    If a dimension is smaller than in the full output, it is this rank's part. Context ranks hold
    one chunk from the beginning of the positions and one from the end; other dimensions are split
    by tensor ranks.

    Args:
        full: Shape of the full output for all samples.
        part: Shape on the rank.
        micro_batch: Micro-batch and its layout.
        pieces: Number of tensors that are packed in the last dimension, each of them split.
        of_samples: Whether to return None if the first dimension is not that of samples. This is
            for gradients of a table of positions, which all samples share.

    Returns:
        Index tensors, one for each dimension; None if the region is unknown.
    """
    layout = micro_batch.layout
    if len(full) != len(part) or len(part) < 2:
        return None
    dims = [torch.arange(size) for size in full]
    positions = 1
    if (full[0], part[0]) == (_samples(layout), layout.micro_batch_size):
        dims[0] = torch.arange(micro_batch.first_row, micro_batch.first_row + part[0])
    elif of_samples:
        return None
    elif len(part) == 2:
        positions = 0  # a table of positions, shared by all samples
    elif (full[0], part[0]) != (1, 1):
        return None  # tokens are distributed among experts
    coordinates = layout.coordinates(micro_batch.rank)
    if layout.context > 1 and len(dims[positions]) % (2 * layout.context) == 0:
        chunks = dims[positions].chunk(2 * layout.context)
        if len(dims[positions]) != part[positions]:
            dims[positions] = torch.cat((chunks[coordinates["cp"]], chunks[-1 - coordinates["cp"]]))
    for dim in range(positions, len(part)):
        if len(dims[dim]) != part[dim]:
            count = pieces if dim == len(part) - 1 else 1
            shards = [piece.chunk(layout.tensor) for piece in dims[dim].chunk(count)]
            if any(len(chunks) <= coordinates["tp"] for chunks in shards):
                return None
            dims[dim] = torch.cat([chunks[coordinates["tp"]] for chunks in shards])
    if [*map(len, dims)] != [*part]:
        return None
    return tuple(
        index.view([-1 if dim == other else 1 for other in range(len(dims))])
        for dim, index in enumerate(dims)
    )


def _samples(layout: Layout) -> int:
    return layout.micro_batch_size * layout.micro_batches * layout.data_ranks


def first_floating(output: Any) -> Tensor | None:
    """Return the first floating-point tensor in a module's output, or None."""
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if leaf.is_floating_point()), None)
