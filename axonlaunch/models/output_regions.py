"""Which part of a whole output a rank's micro-batch is: its samples, positions and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from axonlaunch.config.layout import Layout


@dataclass(frozen=True)
class MicroBatchPlace:
    """A micro-batch of a rank.

    Attributes:
        layout: Of the run.
        rank: Whose.
        number: Which of the rank's micro-batches.
    """

    layout: Layout
    rank: int
    number: int

    @property
    def first_row(self) -> int:
        """Place of its first sample in the global batch."""
        layout = self.layout
        before = layout.data_shard(self.rank) * layout.micro_batches + self.number
        return before * layout.micro_batch_size


def pieces_of(module: nn.Module) -> int:
    """Return how many equal tensors, each of them cut, a layer's outputs are: 1, or 2 packed."""
    cut = getattr(module, "cuts", {}).get("weight")
    return int(getattr(cut, "pieces", 1))


def gives_partial_sums(module: nn.Module) -> bool:
    """Say whether what a rank's module returns is a part of a sum over ranks, not of a tensor."""
    return getattr(module, "gives_partial_sums", False)


def gets_partial_gradients(module: nn.Module) -> bool:
    """Say the same of the gradient of what it returns."""
    return getattr(module, "gets_partial_gradients", False)


def join_outputs(calls: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """Return a plain model's output for the whole batch; None: its calls don't make one.

    Args:
        calls: One for each forward.
        layout: The other side's.
    """
    if not calls or any(call.ndim < 2 or call.shape[1:] != calls[0].shape[1:] for call in calls):
        return None
    if sum(map(len, calls)) == _samples(layout):
        return torch.cat([*calls]) if len(calls) > 1 else calls[0]
    is_of_positions = calls[0].ndim == 2 or len(calls[0]) == 1
    return calls[0] if len(calls) == 1 and is_of_positions else None


def region(
    whole: Sequence[int],
    part: Sequence[int],
    place: MicroBatchPlace,
    *,
    pieces: int = 1,
    of_samples: bool = False,
) -> tuple[Tensor, ...] | None:
    """Return indices of what a rank's micro-batch has of a whole output, one for each dim.

    A dim that is smaller than the whole's is this rank's part of it: of positions, which context
    ranks have a piece of the beginning and one of the end of, or of what tensor ranks divide.

    Args:
        whole: Shape for all samples.
        part: Shape on the rank.
        place: Which micro-batch.
        pieces: Tensors that lie one behind the other in the last dim, each of which is divided.
        of_samples: Whether nothing else is known: all samples share the gradient of a table of
            positions.

    Returns:
        None where it is not known.
    """
    layout = place.layout
    if len(whole) != len(part) or len(part) < 2:
        return None
    dims = [torch.arange(size) for size in whole]
    positions = 1
    if (whole[0], part[0]) == (_samples(layout), layout.micro_batch_size):
        dims[0] = torch.arange(place.first_row, place.first_row + part[0])
    elif of_samples:
        return None
    elif len(part) == 2:
        positions = 0  # a table of positions, the same for every sample
    elif (whole[0], part[0]) != (1, 1):
        return None  # of tokens that experts share out
    at = layout.coordinates(place.rank)
    if layout.context > 1 and len(dims[positions]) % (2 * layout.context) == 0:
        chunks = dims[positions].chunk(2 * layout.context)
        if len(dims[positions]) != part[positions]:
            dims[positions] = torch.cat((chunks[at["cp"]], chunks[-1 - at["cp"]]))
    for dim in range(positions, len(part)):
        if len(dims[dim]) != part[dim]:
            count = pieces if dim == len(part) - 1 else 1
            each = [piece.chunk(layout.tensor) for piece in dims[dim].chunk(count)]
            if any(len(chunks) <= at["tp"] for chunks in each):
                return None
            dims[dim] = torch.cat([chunks[at["tp"]] for chunks in each])
    if [*map(len, dims)] != [*part]:
        return None
    return tuple(
        index.view([-1 if dim == own else 1 for own in range(len(dims))])
        for dim, index in enumerate(dims)
    )


def _samples(layout: Layout) -> int:
    return layout.micro_batch_size * layout.micro_batches * layout.data_ranks


def first_floating(output: Any) -> Tensor | None:
    """Return the first floating-point tensor of what a module returns, if there is one."""
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if leaf.is_floating_point()), None)
