"""Runs three chunks of a loss in place of many, in traces on fake tensors.

All chunks but the last have equal shapes. The first and the last run as they are, and one between
them stands for all others:

- Backward runs the chunks from the last to the first. The gradient of the head's weight is written
  by the last one and added to by each other one. The first one completes it, so that nothing that
  happens once, such as adding it to an earlier micro-batch's, happens beside the one in between.
- The gradients of the hidden states of all chunks exist until the first one is done. The chunk in
  between runs as the last of those that it stands for: the gradients of the others exist already.

If only the head is trained, no hidden states have gradients, and no backward tells where a chunk
ends. All chunks run then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axonlaunch.engines.tensor.outputs import chunked_loss
from axonlaunch.engines.tensor.outputs.deferred_head import DeferredHead

Repeat = Callable[[int], None]
"""Is called with the number of chunks for which all operations until its next call stand."""

_LEAST = 4
"""Number of chunks from which not all are run."""


@contextmanager
def few_chunks(repeat: Repeat) -> Iterator[None]:
    """Run at most three chunks of each loss while the context is entered.

    Args:
        repeat: Is called where the number of chunks for which operations stand changes.
    """
    sum_of_all = chunked_loss.sum_of_chunks

    def sum_of_few(
        loss: chunked_loss.LossSum,
        head: DeferredHead,
        rows: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> Tensor:
        only_head = torch.is_grad_enabled() and not rows[0].requires_grad
        if len(rows) < _LEAST or only_head:
            return sum_of_all(loss, head, rows, targets)
        first, *middle, last = rows
        total = torch.zeros((), device=first.device)
        total = total + chunked_loss.chunk_loss(loss, head, first, targets[0])
        repeat(len(middle))
        gradients: list[Tensor] = []
        entered = _enter(repeat, gradients, *middle)
        one = chunked_loss.chunk_loss(loss, head, entered, targets[1])
        empty = partial(torch.empty, first.shape, dtype=first.dtype, device=first.device)
        left: Tensor = _leave(repeat, gradients, len(middle), empty, one)
        total = total + left
        repeat(1)
        return total + chunked_loss.chunk_loss(loss, head, last, targets[-1])

    chunked_loss.sum_of_chunks = sum_of_few
    try:
        yield
    finally:
        chunked_loss.sum_of_chunks = sum_of_all


class _Enter(torch.autograd.Function):
    """Returns the first of several chunks; its backward ends that of the chunk."""

    @staticmethod
    def forward(ctx: Any, repeat: Repeat, gradients: list[Tensor], *chunks: Tensor) -> Tensor:
        ctx.repeat, ctx.gradients = repeat, gradients
        return chunks[0].view_as(chunks[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.repeat(1)
        others = [*ctx.gradients]
        ctx.gradients.clear()
        return None, None, gradient, *others


class _Leave(torch.autograd.Function):
    """Returns a chunk's loss; its backward first makes the gradients of the other chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        repeat: Repeat,
        gradients: list[Tensor],
        count: int,
        empty: Callable[[], Tensor],
        loss: Tensor,
    ) -> Tensor:
        ctx.repeat, ctx.gradients, ctx.count, ctx.empty = repeat, gradients, count, empty
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.gradients += [ctx.empty() for _ in range(ctx.count - 1)]
        ctx.repeat(ctx.count)
        return None, None, None, None, gradient


_enter: Any = _Enter.apply
_leave: Any = _Leave.apply
