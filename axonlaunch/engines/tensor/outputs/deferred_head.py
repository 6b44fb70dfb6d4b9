"""Losses that are computed from hidden states, so that the full logits never exist.

The head returns its input unchanged, and the loss applies the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.comm.autograd import collect_from
from axonlaunch.engines.precision.lower_parameters import reading_lower
from axonlaunch.engines.tensor.outputs.logits_recorder import LogitsRecorder
from axonlaunch.engines.tensor.parallel_layers.fused_region import enter_region
from axonlaunch.engines.tensor.parallel_layers.layers import ColumnParallelLinear
from axonlaunch.models.specs.loss import with_auxiliary_loss
from axonlaunch.models.specs.model_spec import ModelOutputs

RowLoss = Callable[["DeferredHead", Tensor, Tensor], Tensor]
"""Maps the head, hidden states [N, hidden] and classes [N] to the sum over counted classes."""


class HeadLoss:
    """Computes summed losses from hidden states and a deferred head."""

    def __init__(self) -> None:
        """Create it without a head, see ``defer``."""
        self._heads: list[DeferredHead] = []

    def defer(self, head: nn.Module, module: nn.Module) -> DeferredHead:
        """Make a head return its input; only one head per rank may be called.

        Args:
            head: The layer that computes logits.
            module: The model or pipeline stage that calls the head in its forward.
        """
        self._heads.append(DeferredHead(head, module))
        return self._heads[-1]

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

    def sum(self, loss: RowLoss, outputs: Tensor | ModelOutputs, targets: Tensor) -> Tensor:
        """Return the summed loss in fp32, including an auxiliary loss of the model.

        Args:
            loss: Sums the loss of hidden states.
            outputs: Hidden states in place of logits.
            targets: Classes.
        """
        return with_auxiliary_loss(partial(self._sum, loss), outputs, targets)

    def _sum(self, loss: RowLoss, hidden: Tensor, targets: Tensor) -> Tensor:
        [head] = self._heads
        entered = head.enter_head(hidden)
        rows, targets = entered.flatten(0, -2), targets.flatten()
        if len(rows) != len(targets):
            raise ValueError(f"{len(rows)} hidden states do not fit {len(targets)} targets")
        return loss(head, rows, targets)


class DeferredHead:
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

    def changes_of_logits(self) -> list[str]:
        """Return the names of operations by which the last forward changed its logits."""
        return self._after.changes()

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
        with self._arithmetic():
            if not isinstance(head, ColumnParallelLinear):
                return self._after.apply(self._apply(hidden))
            logits = self._after.apply(F.linear(hidden, *head.rank_parameters()))
        return collect_from(logits, head.axis.group, -1) if head.gather_output else logits

    @contextmanager
    def linear(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Return a context with the weight [C, hidden] and the bias of a complete linear head."""
        assert isinstance(self._head, nn.Linear)
        with self._arithmetic():
            yield self._head.weight, self._head.bias

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Return a context that computes in the types of the forward."""
        with self._autocast(), reading_lower(self._head):
            yield
