"""Runs forward and backward of a rank's share of a batch, through a local model or a pipeline.

Gradients are left in the parameters. The engine averages and clips them and updates parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from axonlaunch.config import ConfigError
from axonlaunch.data.datasets.dataset import AnyBatch, Batch, MicroBatch
from axonlaunch.engines.data_parallel.ddp import DDP
from axonlaunch.engines.expert.routing import InvalidRouteError
from axonlaunch.models.specs.model_spec import ModelOutputs, not_a_tensor

if TYPE_CHECKING:  # importing it imports torch's compiler
    from axonlaunch.engines.pipeline.pipeline import Pipeline

Outputs = Tensor | ModelOutputs
Loss = Callable[[Any, Any], Tensor]
"""Maps ``(outputs, micro-batch)`` to a loss; on the last pipeline stage ``(outputs, targets)``."""


class ForwardBackward(Protocol):
    """The engine's interface to the model on this rank.

    Attributes:
        modules: This rank's part of the model: the full model, or its stages.
        gives_outputs: Whether this rank computes outputs and losses.
    """

    modules: tuple[nn.Module, ...]
    gives_outputs: bool

    def train(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run forward and backward of every micro-batch; return losses, [] on ranks without any."""

    def losses(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run only the forward; return the micro-batches' losses, [] on ranks without outputs."""

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the outputs, on every rank of the pipeline."""


class LocalForwardBackward:
    """Runs the full model on this rank, one micro-batch after another."""

    def __init__(
        self, module: nn.Module, *, forward: nn.Module, micro_batch_size: int, device: torch.device
    ) -> None:
        """Wrap a model.

        Args:
            module: The module that holds the parameters.
            forward: The module to call: ``module`` or its wrapper.
            micro_batch_size: Number of samples per forward.
            device: Device of the model.
        """
        self.modules: tuple[nn.Module, ...] = (module,)
        self.gives_outputs = True
        self._forward = forward
        self._size = micro_batch_size
        self._device = device

    def train(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run forward and backward of every micro-batch; return their losses."""
        losses: list[Tensor] = []
        remaining = -(-len(batch) // self._size)
        for micro_batch in batch.micro_batches(self._size):
            remaining -= 1
            start = len(losses) * self._size
            with self._synchronize(last=not remaining), _locating(micro_batch, start):
                micro_batch_loss = self._loss(micro_batch, loss)
                micro_batch_loss.backward()
            losses.append(micro_batch_loss.detach())
        return losses

    def losses(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run only the forward; return the micro-batches' losses."""
        losses: list[Tensor] = []
        for micro_batch in batch.micro_batches(self._size):
            with _locating(micro_batch, len(losses) * self._size):
                losses.append(self._loss(micro_batch, loss))
        return losses

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs.

        Raises:
            ConfigError: The model returned neither a tensor nor an object with logits.
        """
        outputs: object = self._forward(inputs.to(self._device))
        if not isinstance(outputs, Tensor | ModelOutputs):
            raise ConfigError([not_a_tensor(outputs)])
        return outputs if isinstance(outputs, Tensor) else outputs.logits

    def _loss(self, batch: MicroBatch, loss: Loss) -> Tensor:
        batch = batch.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        [module] = self.modules
        inputs, named = batch.forward_arguments(module)
        total = loss(self._forward(*inputs, **named), batch)
        return total if batch.is_counted else total * 0

    def _synchronize(self, last: bool) -> AbstractContextManager[None]:
        """Average replicas only in the last backward; reduce shards in each, to save memory."""
        if isinstance(self._forward, DDP) and not last:
            return self._forward.no_sync()
        return nullcontext()


@contextmanager
def _locating(batch: MicroBatch, start: int, *, micro_batch_size: int = 0) -> Iterator[None]:
    """Add the row in this rank's batch to an error about a token.

    Args:
        batch: Samples whose tokens are computed.
        start: Row of the first of them.
        micro_batch_size: Number of samples of a micro-batch of a pipeline.
    """
    try:
        yield
    except InvalidRouteError as error:
        if isinstance(batch, Batch) and batch.inputs.ndim > 1:
            row = start + error.micro_batch * micro_batch_size
            error.row = row + error.token // batch.inputs.shape[1]
        raise


class PipelineForwardBackward:
    """Runs this rank's stages of a pipeline, in rounds of its schedule."""

    def __init__(self, pipeline: Pipeline, *, micro_batch_size: int) -> None:
        """Wrap a pipeline.

        Args:
            pipeline: This rank's part of the pipeline.
            micro_batch_size: Number of samples per forward.
        """
        self.modules = pipeline.modules
        self.gives_outputs = pipeline.has_last
        self._pipeline = pipeline
        self._size = micro_batch_size

    def train(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run the batch in rounds of the schedule; return losses, [] on ranks without any."""
        assert isinstance(batch, Batch)
        round_size = self._size * self._pipeline.schedule.microbatches
        losses = []
        for start in range(0, len(batch), round_size):
            part = batch.rows(start, start + round_size)
            packing = self._named_inputs(part)
            with _locating(part, start, micro_batch_size=self._size):
                losses += self._pipeline.run(part.inputs, part.targets, loss=loss, **packing)
        return losses

    def losses(self, batch: AnyBatch, *, loss: Loss) -> list[Tensor]:
        """Run only the forward; return the micro-batches' losses, [] on ranks without outputs."""
        assert isinstance(batch, Batch)
        losses = []
        for start in range(0, len(batch), self._size):
            part = batch.rows(start, start + self._size)
            packing = self._named_inputs(part)
            with _locating(part, start):
                outputs = self._pipeline.forward(part.inputs, **packing)
            if outputs is not None:
                losses.append(loss(outputs, part.targets.to(outputs.device)))
        return losses

    def _named_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the named inputs of every stage: positions in packed rows, and padding."""
        _, named = batch.forward_arguments(self.modules[0])
        device = self._pipeline.device
        return {name: value.to(device, non_blocking=True) for name, value in named.items()}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the last stage's outputs on every rank."""
        return self._pipeline.predict(inputs)
