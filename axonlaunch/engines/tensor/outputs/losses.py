"""Computes the loss from model outputs: on full logits, on vocabulary shards, or without logits.

This module only selects the implementation. The losses are defined by the model, by a custom loss,
by ``loss.vocab_parallel_cross_entropy_sum``, ``chunked_loss`` and ``liger_loss``.
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
from axonlaunch.data.datasets.dataset import AnyBatch, Batch, MicroBatch
from axonlaunch.data.datasets.samples import CollatedSamples
from axonlaunch.engines.tensor.outputs.chunked_loss import in_chunks
from axonlaunch.engines.tensor.outputs.deferred_head import HeadLoss
from axonlaunch.engines.tensor.outputs.liger_loss import (
    LinearCrossEntropy,
    linear_cross_entropy_sum,
    with_kernel,
)
from axonlaunch.engines.tensor.outputs.loss import gather_logits, vocab_parallel_cross_entropy_sum
from axonlaunch.models.specs.custom_loss import CustomLoss, build_custom_loss
from axonlaunch.models.specs.loss import cross_entropy_sum, with_auxiliary_loss
from axonlaunch.models.specs.model_spec import IGNORE_INDEX, ModelOutputs, ModelSpec, not_a_tensor


@dataclass(frozen=True)
class Losses:
    """Loss function and output gathering of one engine.

    Attributes:
        loss: ``(outputs, targets) -> sum over counted targets``, 0-dim fp32.
        evaluation_loss: ``loss`` without label smoothing, z-loss and DFT.
        gather_outputs: Gathers a rank's output shard to full outputs.
        head_loss: Computes the loss from hidden states; None computes it from all logits.
        evaluates_logits: Whether evaluations compute all logits, also with ``head_loss``.
        custom: User-defined loss that replaces ``loss``.
    """

    loss: Callable[[Any, Tensor], Tensor]
    evaluation_loss: Callable[[Any, Tensor], Tensor]
    gather_outputs: Callable[[Tensor], Tensor]
    head_loss: HeadLoss | None = None
    evaluates_logits: bool = False
    custom: CustomLoss | None = None

    def sum(self, outputs: Any, batch: MicroBatch | Tensor) -> Tensor:
        """Return the training loss of a micro-batch, 0-dim.

        Args:
            outputs: Outputs of the model.
            batch: The micro-batch, or only its targets on the last pipeline stage.

        Raises:
            ConfigError: The model did not return a tensor and the loss requires one, or a custom
                loss returned no sum.
        """
        return self._sum(self.loss, outputs, batch)

    def evaluation_sum(self, outputs: Any, batch: MicroBatch | Tensor) -> Tensor:
        """Return the loss of a micro-batch without label smoothing, z-loss and DFT, 0-dim."""
        return self._sum(self.evaluation_loss, outputs, batch)

    def _sum(
        self, loss: Callable[[Any, Tensor], Tensor], outputs: Any, batch: MicroBatch | Tensor
    ) -> Tensor:
        if self.custom is not None:
            assert not isinstance(batch, Tensor)
            return self.custom.sum(outputs, batch.full)
        if not isinstance(outputs, Tensor | ModelOutputs):
            raise ConfigError([not_a_tensor(outputs)])
        assert not isinstance(batch, CollatedSamples)
        return loss(outputs, batch if isinstance(batch, Tensor) else batch.targets)

    def count(self, batch: AnyBatch, *, micro_batch_size: int) -> Tensor:
        """Return the divisor of the loss for a rank's share of a batch, 0-dim int64.

        It is the number of counted targets; with a custom loss, its count or the number of samples.
        """
        if isinstance(batch, Batch) and (self.custom is None or self.custom.count is None):
            targets = batch.targets[: len(batch) - batch.surplus]
            if targets.is_floating_point():
                return torch.tensor(targets.numel())
            return (targets != IGNORE_INDEX).sum()
        counted = [part for part in batch.micro_batches(micro_batch_size) if part.is_counted]
        count = self.custom.count if self.custom else None
        counts = [part.num_samples if count is None else int(count(part.full)) for part in counted]
        return torch.tensor(sum(counts))

    def evaluating(self) -> AbstractContextManager[Any]:
        """Return a context for evaluations, in which ``evaluation_sum`` may be used."""
        return self.whole_logits() if self.evaluates_logits else nullcontext()

    def whole_logits(self) -> AbstractContextManager[Any]:
        """Return a context in which the model returns full logits, also with ``head_loss``."""
        return nullcontext() if self.head_loss is None else self.head_loss.whole_logits()


def losses_of(
    spec: ModelSpec,
    train: TrainConfig,
    *,
    classes: int | None,
    group: ProcessGroup,
    kernel: LinearCrossEntropy = linear_cross_entropy_sum,
    evaluates_logits: bool = False,
) -> Losses:
    """Select the loss of a model.

    Args:
        spec: Specification of the model.
        train: Training options, with the name of a custom loss and the chunk size in tokens.
        classes: Total number of classes, if the logits are sharded; None if every rank has all.
        group: The ranks among which the classes are sharded.
        kernel: Computes head and loss together, with ``train.loss_kernel``.
        evaluates_logits: Whether evaluations need all logits, for metrics.
    """
    head_loss = HeadLoss() if train.defers_head else None
    gather: Callable[[Tensor], Tensor] = _as_is
    if classes is not None:
        gather = partial(gather_logits, group=group, classes=classes)

    def select(from_hidden: bool, **terms: float) -> Callable[[Any, Tensor], Tensor]:
        """Return the loss with non-zero terms that are added to cross entropy."""
        if from_hidden and head_loss is not None and train.loss_kernel is not None:
            return partial(head_loss.sum, with_kernel(kernel, **terms))
        loss: Callable[[Any, Tensor], Tensor] = partial(spec.loss, **terms) if terms else spec.loss
        if classes is not None:
            divided = partial(vocab_parallel_cross_entropy_sum, group=group, classes=classes)
            loss = partial(divided, **terms)
        if from_hidden and head_loss is not None and train.loss_chunk is not None:
            return partial(head_loss.sum, in_chunks(loss, chunk=train.loss_chunk))
        if classes is not None:
            return partial(with_auxiliary_loss, loss)
        if train.compile and spec.loss is cross_entropy_sum:
            # Eager cross entropy reads and writes the full fp32 logits in each of its five kernels.
            return torch.compile(loss, mode=train.compile_mode)
        return loss

    terms = {name: getattr(train, name) for name in ("label_smoothing", "z_loss", "dft", "eaft")}
    terms = {name: value for name, value in terms.items() if value}
    loss = select(True, **terms)
    is_same = not terms and not (evaluates_logits and head_loss)
    evaluation_loss = loss if is_same else select(not evaluates_logits)
    return Losses(
        loss,
        evaluation_loss,
        gather,
        head_loss,
        evaluates_logits=evaluates_logits,
        custom=build_custom_loss(train),
    )


def _as_is(outputs: Tensor) -> Tensor:
    return outputs
