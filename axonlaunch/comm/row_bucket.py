"""Gradients laid out by rows, so that one message gives each rank the mean of its own rows alone.

Source: PyTorch, ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``, whose layout it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm.backend import Backend
from axonlaunch.comm.gradient_bucket import begin_mean
from axonlaunch.comm.process_group import ProcessGroup
from axonlaunch.comm.torch_internals import chunk_cat, reduce_scatter_single


def rows_of(count: int, *, rank: int, ranks: int) -> slice:
    """Return which of so many rows are a rank's: torch.chunk's, which is Shard(0)'s, division.

    Of 5 rows 2 ranks have 3 and 2; of 4 rows 3 ranks have 2, 2 and none.

    Args:
        count: Rows of the whole.
        rank: Which rank, from 0.
        ranks: How many divide them.
    """
    step = padded_rows(count, ranks=ranks)
    return slice(min(rank * step, count), min((rank + 1) * step, count))


def padded_rows(count: int, *, ranks: int) -> int:
    """Return how many of so many rows each rank has in a message, those of padding too."""
    return -(-count // ranks)


def padded_lengths(shapes: Sequence[torch.Size], *, ranks: int) -> list[int]:
    """Return the elements of each tensor that a rank has in a message, those of padding too.

    Of tensors [5, 2] and [3] two ranks have 6 and 2 each; a tensor without dimensions goes to all.

    Args:
        shapes: Of whole tensors.
        ranks: How many divide their rows.
    """
    return [
        padded_rows(shape[0], ranks=ranks) * shape[1:].numel() if shape else 1 for shape in shapes
    ]


class RowBucket:
    """Tensors of one dtype and device whose rows are divided among the ranks of a group.

    Every rank's rows of all tensors lie together, the last ranks' padded by zeros: of tensors
    [5, 2] and [3] two ranks have 6 + 2 elements each. A tensor without dimensions goes to all.

    Attributes:
        capacity: Elements that are sent, those of padding too.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        *,
        group: ProcessGroup,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Lay tensors out; storage is allocated when they are sent.

        Args:
            shapes: Of the tensors.
            group: The ranks, in whose order rows are divided.
            dtype: Type in which tensors are summed; None: their own.
        """
        self._dtype = dtype
        self._group = group
        rank, ranks = group.rank, group.size
        mine = [rows_of(shape[0] if shape else 1, rank=rank, ranks=ranks) for shape in shapes]
        self._shapes = [
            torch.Size((own.stop - own.start, *shape[1:])) if shape else shape
            for shape, own in zip(shapes, mine, strict=True)
        ]
        self._lengths = padded_lengths(shapes, ranks=ranks)
        self.capacity = ranks * sum(self._lengths)
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way."""
        return self._work is None

    @torch.no_grad()
    def start(self, tensors: Sequence[Tensor]) -> None:
        """Begin to average tensors over the group; all its ranks call it.

        Args:
            tensors: Plain, of the shapes that were said; they may be freed afterwards.
        """
        ranks, group = self._group.size, self._group.torch_group
        rows = [part if part.ndim else part.expand(ranks) for part in tensors if part.numel()]
        length = sum(self._lengths)
        flat = tensors[0].new_empty((ranks, length), dtype=self._dtype)
        chunk_cat(rows, chunks=ranks, out=flat)
        # Held as long as it is read, which is until it is waited for.
        self._sent = flat.view(-1)
        self._received = flat.new_empty(length)
        operation = begin_mean(self._sent, source=tensors[0].dtype, group=group)
        if self._reduces_whole:
            self._work = dist.all_reduce(self._sent, operation, group=group, async_op=True)
        else:
            self._work = reduce_scatter_single(
                self._received, self._sent, op=operation, group=group, async_op=True
            )

    def finish(self) -> list[Tensor]:
        """Wait, and return the mean of this rank's rows of each tensor: views, of one storage."""
        assert self._work is not None, "nothing was started"
        assert self._sent is not None
        assert self._received is not None
        self._work.wait()
        if self._reduces_whole:
            self._received.copy_(self._sent.view(self._group.size, -1)[self._group.rank])
        pieces = self._received.split(self._lengths)
        self._sent, self._received, self._work = None, None, None
        return [
            piece[: shape.numel()].view(shape)
            for piece, shape in zip(pieces, self._shapes, strict=True)
        ]

    @property
    def _reduces_whole(self) -> bool:
        """Whether all rows are reduced on every rank, as gloo does in any case.

        It would reduce a copy of them, which takes twice the time and the memory.
        """
        return self._group.backend is Backend.GLOO

    def clear(self) -> None:
        """Let go what was sent, once it has arrived."""
        if self._work is not None:
            self._work.wait()
        self._sent, self._received, self._work = None, None, None
