"""Computes head and cross entropy in chunks of tokens, so the full logits never exist.

The head returns its input unchanged, and the loss applies the head; backward recomputes each
chunk's logits. Nothing is approximated. Elementwise operations of the model after the head, such as
softcapping, are applied to each chunk's logits.

Source: Hsu et al., "Liger Kernel", 2024, section 3.2, and torchtitan's chunked loss. Unlike those,
no gradient of the head is kept between forward and backward; a pipeline would have to keep one for
each micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonlaunch.comm.autograd import collect_from
from axonlaunch.engines.precision.lower_parameters import reading_lower
from axonlaunch.engines.tensor.outputs.logits_recorder import LogitsRecorder
from axonlaunch.engines.tensor.parallel_layers.fused_region import enter_region
from axonlaunch.engines.tensor.parallel_layers.layers import ColumnParallelLinear
from axonlaunch.models.specs.loss import with_auxiliary_loss
from axonlaunch.models.specs.model_spec import ModelOutputs

_Sum = Callable[[Tensor, Tensor], Tensor]


class ChunkedLoss:
    """Computes summed losses from hidden states and a deferred head."""

    def __init__(self, *, chunk: int) -> None:
        """Create it without a head, see ``defer``.

        Args:
            chunk: Number of tokens per chunk.
        """
        self._chunk = chunk
        self._heads: list[_DeferredHead] = []

    def defer(self, head: nn.Module, module: nn.Module) -> None:
        """Make a head return its input; only one head per rank may be called.

        Args:
            head: The layer that computes logits.
            module: The model or pipeline stage that calls the head in its forward.
        """
        self._heads.append(_DeferredHead(head, module))

    @contextmanager
    def whole_logits(self) -> Iterator[None]:
        """Make heads return logits while the context is active. The loss cannot be used in it."""
        for head in self._heads:
            head.is_deferred = False
        try:
            yield
        finally:
            for head in self._heads:
                head.is_deferred = True

    def sum(self, loss: _Sum, outputs: Tensor | ModelOutputs, targets: Tensor) -> Tensor:
        """Return the summed loss in fp32, including an auxiliary loss of the model.

        Args:
            loss: Maps ``(logits, targets)`` to the sum over counted targets.
            outputs: Hidden states in place of logits.
            targets: Classes.
        """
        return with_auxiliary_loss(partial(self._sum, loss), outputs, targets)

    def _sum(self, loss: _Sum, hidden: Tensor, targets: Tensor) -> Tensor:
        [head] = self._heads
        entered = head.enter_head(hidden)
        rows, targets = entered.flatten(0, -2), targets.flatten()
        if len(rows) != len(targets):
            raise ValueError(f"{len(rows)} hidden states do not fit {len(targets)} targets")
        total = torch.zeros((), device=rows.device)
        pairs = zip(rows.split(self._chunk), targets.split(self._chunk), strict=True)
        for hidden_chunk, target_chunk in pairs:
            total = total + _chunk_loss(loss, head, hidden_chunk, target_chunk)
        return total


def _chunk_loss(loss: _Sum, head: _DeferredHead, hidden: Tensor, targets: Tensor) -> Tensor:
    def compute(hidden: Tensor) -> Tensor:
        return loss(head.logits(hidden), targets)

    if not torch.is_grad_enabled():
        return compute(hidden)
    summed: Any = checkpoint(compute, hidden, use_reentrant=False, preserve_rng_state=False)
    total: Tensor = summed
    return total


class _DeferredHead:
    """A head that returns its input and is applied later under the same autocast settings."""

    def __init__(self, head: nn.Module, module: nn.Module) -> None:
        self.is_deferred = True
        self._after = LogitsRecorder()
        module.register_forward_hook(self._after.end, always_call=True)
        self._head = head
        self._apply = head.forward
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        head.forward = self._forward

    def _forward(self, hidden: Tensor) -> Any:
        if not self.is_deferred:
            return self._apply(hidden)
        kind = hidden.device.type
        self._autocast = nullcontext
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            # Each chunk casts the weight itself. The autocast cache would only keep casts of the
            # forward.
            self._autocast = lambda: torch.autocast(kind, dtype=dtype, cache_enabled=False)
        return self._after.begin(hidden)

    def enter_head(self, hidden: Tensor) -> Tensor:
        """Bring hidden states into the head's region, so that their gradient is summed once."""
        head = self._head
        if not isinstance(head, ColumnParallelLinear):
            return hidden
        parts = head.region.sequence_parallel
        return enter_region(hidden, head.axis.group, sequence_parallel=parts)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of a chunk of hidden states."""
        head = self._head
        with self._autocast(), reading_lower(head):
            if not isinstance(head, ColumnParallelLinear):
                return self._after.apply(self._apply(hidden))
            logits = self._after.apply(F.linear(hidden, *head.rank_parameters()))
        return collect_from(logits, head.axis.group, -1) if head.gather_output else logits
