"""What an engine makes of a model's outputs: their loss, whole, divided or in chunks, and logits.

It chooses; the sums themselves are those of the model, of a user's own loss, of the tensor axis and
of the chunks.
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
from axonlaunch.config import ConfigError
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.dataset import AnyBatch, Batch, MicroBatch
from axonlaunch.data.samples import CollatedSamples
from axonlaunch.engines.tensor.chunked_loss import ChunkedLoss
from axonlaunch.engines.tensor.loss import gather_logits, vocab_parallel_cross_entropy_sum
from axonlaunch.models.loss import cross_entropy_sum, with_auxiliary_loss
from axonlaunch.models.own_loss import OwnLoss, own_loss
from axonlaunch.models.spec import IGNORE_INDEX, ModelOutputs, ModelSpec, not_a_tensor


@dataclass(frozen=True)
class Losses:
    """What is made of a model's outputs.

    Attributes:
        loss: ``(outputs, targets) -> sum over counted targets``, 0-dim fp32.
        gather_outputs: Makes a rank's outputs whole.
        chunked: The loss, if it is computed in chunks.
        own: A loss of one's own, in place of ``loss``.
    """

    loss: Callable[[Any, Tensor], Tensor]
    gather_outputs: Callable[[Tensor], Tensor]
    chunked: ChunkedLoss | None = None
    own: OwnLoss | None = None

    def sum(self, outputs: Any, judged: MicroBatch | Tensor) -> Tensor:
        """Return the loss of a micro-batch, 0-dim.

        Args:
            outputs: What the model returned.
            judged: The micro-batch; of the last stage of a pipeline its targets.

        Raises:
            ConfigError: The outputs are no tensor, and the loss takes nothing else.
        """
        if self.own is not None:
            assert not isinstance(judged, Tensor)
            return self.own.sum(outputs, judged.whole)
        if not isinstance(outputs, Tensor | ModelOutputs):
            raise ConfigError([not_a_tensor(outputs)])
        assert not isinstance(judged, CollatedSamples)
        return self.loss(outputs, judged if isinstance(judged, Tensor) else judged.targets)

    def count(self, batch: AnyBatch, *, micro_batch_size: int) -> Tensor:
        """Return what the losses of a rank's share of a batch are divided by, 0-dim int64."""
        if isinstance(batch, Batch) and (self.own is None or self.own.count is None):
            targets = batch.targets[: len(batch) - batch.surplus]
            if targets.is_floating_point():
                return torch.tensor(targets.numel())
            return (targets != IGNORE_INDEX).sum()
        counted = [part for part in batch.micro_batches(micro_batch_size) if part.is_counted]
        count = self.own.count if self.own else None
        counts = [part.num_samples if count is None else int(count(part.whole)) for part in counted]
        return torch.tensor(sum(counts))

    def whole_logits(self) -> AbstractContextManager[Any]:
        """Let the model give logits that the loss would compute itself."""
        return nullcontext() if self.chunked is None else self.chunked.whole_logits()


def losses_of(
    spec: ModelSpec, train: TrainConfig, *, classes: int | None, group: ProcessGroup
) -> Losses:
    """Choose the loss of a model.

    Args:
        spec: The model's.
        train: Names a loss of one's own, and says how many tokens' logits exist at a time.
        classes: Of logits that the ranks of a group divide; None: every rank has all.
        group: Those ranks.
    """
    loss: Callable[[Any, Tensor], Tensor] = spec.loss
    summed: Callable[[Tensor, Tensor], Tensor] = spec.loss
    gather: Callable[[Tensor], Tensor] = _as_is
    if classes is not None:
        summed = partial(vocab_parallel_cross_entropy_sum, group=group, classes=classes)
        loss = partial(with_auxiliary_loss, summed)
        gather = partial(gather_logits, group=group, classes=classes)
    elif train.compile and train.loss_chunk is None and spec.loss is cross_entropy_sum:
        # Eagerly it reads and writes whole logits, in fp32, once for each of its five kernels.
        loss = torch.compile(cross_entropy_sum, mode=train.compile_mode)
    if train.loss_chunk is None:
        return Losses(loss, gather, own=own_loss(train))
    chunked = ChunkedLoss(summed, chunk=train.loss_chunk)
    return Losses(chunked, gather, chunked)


def _as_is(outputs: Tensor) -> Tensor:
    return outputs
