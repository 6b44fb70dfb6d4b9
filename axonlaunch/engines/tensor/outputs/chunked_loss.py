"""Computes head and cross entropy in chunks of tokens, so the full logits never exist.

Backward recomputes each chunk's logits. Nothing is approximated. Elementwise operations of the
model after the head, such as softcapping, are applied to each chunk's logits.

Source: Hsu et al., "Liger Kernel", 2024, section 3.2, and torchtitan's chunked loss. Unlike those,
no gradient of the head is kept between forward and backward; a pipeline would have to keep one for
each micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from axonlaunch.engines.tensor.outputs.deferred_head import DeferredHead, RowLoss

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Maps logits and targets to the sum over counted targets."""


def in_chunks(loss: LossSum, *, chunk: int) -> RowLoss:
    """Return the loss of hidden states, computed for a number of tokens at a time.

    Args:
        loss: Maps ``(logits, targets)`` to the sum over counted targets.
        chunk: Number of tokens per chunk.
    """

    def compute(head: DeferredHead, rows: Tensor, targets: Tensor) -> Tensor:
        return sum_of_chunks(loss, head, rows.split(chunk), targets.split(chunk))

    return compute


def sum_of_chunks(
    loss: LossSum, head: DeferredHead, rows: Sequence[Tensor], targets: Sequence[Tensor]
) -> Tensor:
    """Return the summed loss of chunks of hidden states and targets. Traces replace it."""
    total = torch.zeros((), device=rows[0].device)
    pairs = zip(rows, targets, strict=True)
    for hidden_chunk, target_chunk in pairs:
        total = total + chunk_loss(loss, head, hidden_chunk, target_chunk)
    return total


def chunk_loss(loss: LossSum, head: DeferredHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of one chunk, whose logits are recomputed in backward."""

    def compute(hidden: Tensor) -> Tensor:
        return loss(head.logits(hidden), targets)

    if not torch.is_grad_enabled():
        return compute(hidden)
    summed: Any = checkpoint(compute, hidden, use_reentrant=False, preserve_rng_state=False)
    total: Tensor = summed
    return total
