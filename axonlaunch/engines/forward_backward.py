"""How a rank's share of a batch passes forward and backward: through the model, or a pipeline.

Gradients are left in the parameters; who averages, clips and updates is the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from axonlaunch.config import ConfigError
from axonlaunch.data.dataset import AnyBatch, Batch, MicroBatch
from axonlaunch.engines.data_parallel.ddp import DDP
from axonlaunch.models.spec import ModelOutputs, not_a_tensor

if TYPE_CHECKING:  # importing it imports torch's compiler
    from axonlaunch.engines.pipeline.pipeline import Pipeline

Outputs = Tensor | ModelOutputs
Loss = Callable[[Any, Any], Tensor]
"""Of outputs and the micro-batch, or in the last stage of a pipeline its targets."""


class ForwardBackward(Protocol):
    """What the engine needs of a model on this rank.

    Attributes:
        modules: What this rank holds of the model: the whole, or stages of it.
        gives_outputs: Whether this rank computes outputs and losses.
    """

    modules: tuple[nn.Module, ...]
    gives_outputs: bool

    def train(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run forward and backward of every micro-batch; return their losses, [] elsewhere."""

    def losses(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run forward alone; return the micro-batches' losses, [] on ranks without outputs."""

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the outputs of inputs, on every rank of the pipeline."""


class LocalForwardBackward:
    """The whole model on this rank, one micro-batch after another."""

    def __init__(
        self, module: nn.Module, *, forward: nn.Module, micro_batch_size: int, device: torch.device
    ) -> None:
        """Take over a model.

        Args:
            module: Owner of the parameters.
            forward: It, or what wraps it.
            micro_batch_size: Samples of one forward.
            device: Where it computes.
        """
        self.modules: tuple[nn.Module, ...] = (module,)
        self.gives_outputs = True
        self._forward = forward
        self._size = micro_batch_size
        self._device = device

    def train(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run forward and backward of every micro-batch."""
        losses = []
        left = -(-len(batch) // self._size)
        for micro_batch in batch.micro_batches(self._size):
            left -= 1
            with self._synchronise(last=not left):
                loss_of_part = self._loss(micro_batch, loss)
                loss_of_part.backward()
            losses.append(loss_of_part.detach())
        return losses

    def losses(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run forward alone."""
        return [self._loss(micro_batch, loss) for micro_batch in batch.micro_batches(self._size)]

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs.

        Raises:
            ConfigError: They are not a tensor, nor hold one in its place.
        """
        outputs: object = self._forward(inputs.to(self._device))
        if not isinstance(outputs, Tensor | ModelOutputs):
            raise ConfigError([not_a_tensor(outputs)])
        return outputs if isinstance(outputs, Tensor) else outputs.logits

    def _loss(self, batch: MicroBatch, loss: Loss) -> Tensor:
        batch = batch.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        [module] = self.modules
        inputs, named = batch.forward_arguments(module.forward)
        total = loss(self._forward(*inputs, **named), batch)
        return total if batch.is_counted else total * 0

    def _synchronise(self, last: bool) -> AbstractContextManager[None]:
        """Replicas agree once, in the last backward; shards are reduced in each, to stay small."""
        if isinstance(self._forward, DDP) and not last:
            return self._forward.no_sync()
        return nullcontext()


class PipelineForwardBackward:
    """This rank's stages of a pipeline, round after round of its schedule."""

    def __init__(self, pipeline: Pipeline, *, micro_batch_size: int) -> None:
        """Take over a pipeline.

        Args:
            pipeline: This rank's end of it.
            micro_batch_size: Samples of one forward.
        """
        self.modules = pipeline.modules
        self.gives_outputs = pipeline.has_last
        self._pipeline = pipeline
        self._size = micro_batch_size

    def train(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run the schedule as many rounds as the batch takes."""
        assert isinstance(batch, Batch)
        in_round = self._size * self._pipeline.schedule.microbatches
        losses = []
        for start in range(0, len(batch), in_round):
            part = batch.rows(start, start + in_round)
            documents = _of_documents(part.positions, self._pipeline.device)
            losses += self._pipeline.run(part.inputs, part.targets, loss=loss, **documents)
        return losses

    def losses(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Pass micro-batches through the stages, forward alone."""
        assert isinstance(batch, Batch)
        losses = []
        for start in range(0, len(batch), self._size):
            part = batch.rows(start, start + self._size)
            documents = _of_documents(part.positions, self._pipeline.device)
            outputs = self._pipeline.forward(part.inputs, **documents)
            if outputs is not None:
                losses.append(loss(outputs, part.targets.to(outputs.device)))
        return losses

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the last stage's outputs on every rank."""
        return self._pipeline.predict(inputs)


def _of_documents(positions: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """Return what a forward is given beside its inputs: nothing, but for packed rows."""
    return {} if positions is None else {"positions": positions.to(device, non_blocking=True)}
