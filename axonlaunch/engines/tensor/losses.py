"""What an engine makes of a model's outputs: their loss, whole, divided or in chunks, and logits.

It chooses; the sums themselves are those of the model, of the tensor axis and of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.tensor.chunked_loss import ChunkedLoss
from axonlaunch.engines.tensor.loss import gather_logits, vocab_parallel_cross_entropy_sum
from axonlaunch.models.loss import cross_entropy_sum, with_auxiliary_loss
from axonlaunch.models.spec import ModelSpec


@dataclass(frozen=True)
class Losses:
    """What is made of a model's outputs.

    Attributes:
        loss: ``(outputs, targets) -> sum over counted targets``, 0-dim fp32.
        gather_outputs: Makes a rank's outputs whole.
        chunked: The loss, if it is computed in chunks.
    """

    loss: Callable[[Any, Tensor], Tensor]
    gather_outputs: Callable[[Tensor], Tensor]
    chunked: ChunkedLoss | None = None

    def whole_logits(self) -> AbstractContextManager[Any]:
        """Let the model give logits that the loss would compute itself."""
        return nullcontext() if self.chunked is None else self.chunked.whole_logits()


def losses_of(
    spec: ModelSpec,
    *,
    classes: int | None,
    group: ProcessGroup,
    chunk: int | None,
    is_compiled: bool = False,
) -> Losses:
    """Choose the loss of a model.

    Args:
        spec: The model's.
        classes: Of logits that the ranks of a group divide; None: every rank has all.
        group: Those ranks.
        chunk: Tokens whose logits exist at a time; None: all.
        is_compiled: Whether blocks are. The cross entropy of whole logits is then, too: eagerly it
            reads and writes them, in fp32, once for each of its five kernels.
    """
    loss: Callable[[Any, Tensor], Tensor] = spec.loss
    summed: Callable[[Tensor, Tensor], Tensor] = spec.loss
    gather: Callable[[Tensor], Tensor] = _as_is
    if classes is not None:
        summed = partial(vocab_parallel_cross_entropy_sum, group=group, classes=classes)
        loss = partial(with_auxiliary_loss, summed)
        gather = partial(gather_logits, group=group, classes=classes)
    elif is_compiled and chunk is None and spec.loss is cross_entropy_sum:
        loss = torch.compile(cross_entropy_sum)
    if chunk is None:
        return Losses(loss, gather)
    chunked = ChunkedLoss(summed, chunk=chunk)
    return Losses(chunked, gather, chunked)


def _as_is(outputs: Tensor) -> Tensor:
    return outputs
