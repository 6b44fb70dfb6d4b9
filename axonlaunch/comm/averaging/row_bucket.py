"""Gradients arranged by rows, so that one message gives each rank the mean of only its rows.

Source: the layout is that of PyTorch, ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm.averaging.gradient_bucket import begin_mean
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.process_group import ProcessGroup
from axonlaunch.comm.torch_internals import chunk_cat, reduce_scatter_single


def rows_of(count: int, *, rank: int, ranks: int) -> slice:
    """Return a rank's rows, divided as by ``torch.chunk`` and ``Shard(0)``.

    For 2 ranks and 5 rows, the ranks get 3 and 2 rows. For 3 ranks and 4 rows, they get 2, 2 and 0.

    Args:
        count: Number of rows of the full tensor.
        rank: Rank in the group.
        ranks: Number of ranks in the group.
    """
    step = padded_rows(count, ranks=ranks)
    return slice(min(rank * step, count), min((rank + 1) * step, count))


def padded_rows(count: int, *, ranks: int) -> int:
    """Return the number of rows of each rank in a message, including padding."""
    return -(-count // ranks)


def padded_lengths(shapes: Sequence[torch.Size], *, ranks: int) -> list[int]:
    """Return the number of elements of each tensor that a rank has in a message, with padding.

    For tensors [5, 2] and [3], two ranks have 6 and 2 elements each. A tensor without dimensions is
    sent to all ranks.

    Args:
        shapes: Shapes of the full tensors.
        ranks: Number of ranks that share the rows.
    """
    return [
        padded_rows(shape[0], ranks=ranks) * shape[1:].numel() if shape else 1 for shape in shapes
    ]


class RowBucket:
    """Tensors of one dtype and device with rows that are divided among the ranks of a group.

    The rows of each rank from all tensors are consecutive, and those of the last ranks are padded
    with zeros. For tensors [5, 2] and [3], two ranks have 6 + 2 elements each. A tensor without
    dimensions is sent to all ranks.

    Attributes:
        capacity: Number of sent elements, including padding.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        *,
        group: ProcessGroup,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compute the arrangement; storage is allocated when tensors are sent.

        Args:
            shapes: Shapes of the tensors.
            group: Group of ranks; rows are divided in rank order.
            dtype: Dtype of the sum; None uses the dtype of the tensors.
        """
        self._dtype = dtype
        self._group = group
        rank, ranks = group.rank, group.size
        row_slices = [rows_of(shape[0] if shape else 1, rank=rank, ranks=ranks) for shape in shapes]
        self._shapes = [
            torch.Size((rows.stop - rows.start, *shape[1:])) if shape else shape
            for shape, rows in zip(shapes, row_slices, strict=True)
        ]
        self._lengths = padded_lengths(shapes, ranks=ranks)
        self.capacity = ranks * sum(self._lengths)
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no operation is in progress."""
        return self._work is None

    @torch.no_grad()
    def start(self, tensors: Sequence[Tensor]) -> None:
        """Begin to average tensors over the group; all of its ranks must call this.

        Args:
            tensors: Plain tensors with the shapes that were passed to the constructor; they may be
                freed afterwards.
        """
        ranks, group = self._group.size, self._group.torch_group
        rows = [part if part.ndim else part.expand(ranks) for part in tensors if part.numel()]
        length = sum(self._lengths)
        flat = tensors[0].new_empty((ranks, length), dtype=self._dtype)
        chunk_cat(rows, chunks=ranks, out=flat)
        # Keep it until the operation has finished, because it is read until then.
        self._sent = flat.view(-1)
        self._received = flat.new_empty(length)
        operation = begin_mean(self._sent, source=tensors[0].dtype, group=group)
        if self._reduces_all_rows:
            self._work = dist.all_reduce(self._sent, operation, group=group, async_op=True)
        else:
            self._work = reduce_scatter_single(
                self._received, self._sent, op=operation, group=group, async_op=True
            )

    def finish(self) -> list[Tensor]:
        """Wait, and return the mean of this rank's rows of each tensor, as views of one storage."""
        assert self._work is not None, "nothing was started"
        assert self._sent is not None
        assert self._received is not None
        self._work.wait()
        if self._reduces_all_rows:
            self._received.copy_(self._sent.view(self._group.size, -1)[self._group.rank])
        pieces = self._received.split(self._lengths)
        self._sent, self._received, self._work = None, None, None
        return [
            piece[: shape.numel()].view(shape)
            for piece, shape in zip(pieces, self._shapes, strict=True)
        ]

    @property
    def _reduces_all_rows(self) -> bool:
        """Whether every rank reduces all rows, as gloo always does internally.

        gloo would reduce a copy of the rows, which takes twice the time and memory.
        """
        return self._group.backend is Backend.GLOO

    def clear(self) -> None:
        """Wait for the operation in progress and free its memory."""
        if self._work is not None:
            self._work.wait()
        self._sent, self._received, self._work = None, None, None
