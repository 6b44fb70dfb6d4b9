"""Runs a few chunks of a loss in place of many, on fake tensors.

All chunks but the last have equal shapes. If only the head is trained, no hidden states have
gradients, and no backward tells where a chunk ends. All chunks run then.

In traces (``few_chunks``), the first and the last run as they are, and one between them stands for
all others:

- Backward runs the chunks from the last to the first. The gradient of the head's weight is written
  by the last one and added to by each other one. The first one completes it, so that nothing that
  happens once, such as adding it to an earlier micro-batch's, happens beside the one in between.
- The gradients of the hidden states of all chunks exist until the first one is done. The chunk in
  between runs as the last of those that it stands for: the gradients of the others exist already.

In recordings for the allocator (``ShortLosses``), several run, and ``memory.extend_trace`` repeats
what the one in the middle has requested. Each chunk leaves parts of segments that the next ones
use, so three chunks would not show how much memory all of them reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axonlaunch.engines.tensor.outputs import chunked_loss
from axonlaunch.engines.tensor.outputs.deferred_head import DeferredHead

Repeat = Callable[[int], None]
"""Is called with the number of chunks for which all operations until its next call stand."""

Visit = Callable[[int | None], None]
"""Is called with the index of a chunk that begins its forward or backward, and with None where the
last one has ended."""

_LEAST = 4
"""Number of chunks from which not all are run."""


@contextmanager
def few_chunks(repeat: Repeat = lambda _: None) -> Iterator[None]:
    """Run at most three chunks of each loss while the context is entered.

    Args:
        repeat: Is called where the number of chunks for which operations stand changes.
    """

    def sum_of_few(
        loss: chunked_loss.LossSum,
        head: DeferredHead,
        rows: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> Tensor:
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

    with _replace_sum(sum_of_few, least=_LEAST):
        yield


@dataclass
class ShortLosses:
    """Losses of which a few chunks run, which stand for all.

    Attributes:
        visit: Is called where chunks begin and end.
        most: Number of chunks to run; None for all.
        missing: Number of chunks of a loss that did not run.
    """

    visit: Visit
    most: int | None
    missing: int = 0

    @contextmanager
    def replace(self) -> Iterator[None]:
        """Run few chunks of each loss while the context is entered."""
        if self.most is None:
            yield
            return
        with _replace_sum(self._sum, least=self.most + 1):
            yield

    def _sum(
        self,
        loss: chunked_loss.LossSum,
        head: DeferredHead,
        rows: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> Tensor:
        assert self.most is not None
        self.missing = len(rows) - self.most
        after = self.most // 2
        chosen = [*range(self.most - after), *range(len(rows) - after, len(rows))]
        total = torch.zeros((), device=rows[0].device)
        for index, chunk in enumerate(_choose(chosen, *rows)):
            self.visit(index)
            # The last one to begin its backward, chunk 0, is the last one to end it.
            entered = chunk if index else _tell(partial(self.visit, None), chunk)
            total = total + _tell(
                partial(self.visit, index),
                chunked_loss.chunk_loss(loss, head, entered, targets[chosen[index]]),
            )
        self.visit(None)
        return total


_Sum = Callable[
    [chunked_loss.LossSum, DeferredHead, Sequence[Tensor], Sequence[Tensor]],
    Tensor,
]


@contextmanager
def _replace_sum(short: _Sum, *, least: int) -> Iterator[None]:
    """Sum the loss of ``least`` or more chunks by another function, except to train only a head."""
    sum_of_all = chunked_loss.sum_of_chunks

    def choose(
        loss: chunked_loss.LossSum,
        head: DeferredHead,
        rows: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> Tensor:
        only_head = torch.is_grad_enabled() and not rows[0].requires_grad
        sum_of = sum_of_all if len(rows) < least or only_head else short
        return sum_of(loss, head, rows, targets)

    chunked_loss.sum_of_chunks = choose
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


class _Choose(torch.autograd.Function):
    """Returns some of the chunks; the gradient of the middle one stands for all others."""

    @staticmethod
    def forward(ctx: Any, chosen: Sequence[int], *chunks: Tensor) -> tuple[Tensor, ...]:
        ctx.chosen, ctx.count = chosen, len(chunks)
        return tuple(chunks[index].view_as(chunks[index]) for index in chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        all_gradients = [gradients[len(gradients) // 2]] * ctx.count
        for index, gradient in zip(ctx.chosen, gradients, strict=True):
            all_gradients[index] = gradient
        return None, *all_gradients


class _Tell(torch.autograd.Function):
    """Returns its input; its backward calls a function."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], tensor: Tensor) -> Tensor:
        ctx.tell = tell
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.tell()
        return None, gradient


_choose: Any = _Choose.apply
_tell: Any = _Tell.apply
