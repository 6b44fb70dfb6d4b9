"""The engine of one device and of data parallelism: a step from micro-batches to the update.

It composes what the other files offer; how a layout synchronises is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config.layout import Layout
from axonlaunch.data.dataset import Batch
from axonlaunch.engines.base import StepResult
from axonlaunch.engines.ddp import DDP, GradSyncStrategy
from axonlaunch.engines.fsdp import FSDP
from axonlaunch.engines.precision import LossScale, Precision, autocast
from axonlaunch.engines.update import Update
from axonlaunch.models.spec import IGNORE_INDEX

Loss = Callable[[Tensor, Tensor], Tensor]


class DataParallelEngine:
    """Trains one model on every data rank's share of the global batch."""

    def __init__(
        self,
        model: nn.Module,
        *,
        parallel: DDP | FSDP | None,
        update: Update,
        loss: Loss,
        world: World,
        layout: Layout,
        precision: Precision,
        grad_clip: float | None,
        seed: int,
        rate: Callable[[int], float],
    ) -> None:
        """Take over a model that is on its device, sharded and initialised.

        Args:
            model: Owner of the parameters, under their own names.
            parallel: What wraps it; None on one device.
            update: The optimizer's side.
            loss: ``(outputs, targets) -> sum over counted targets``, 0-dim fp32.
            world: Who takes part.
            layout: Shares of the batch.
            precision: Arithmetic of forward and backward.
            grad_clip: Largest norm of the whole model's gradient; None: any.
            seed: Of what the model draws in training.
            rate: Learning rate of a step.
        """
        self.model = model
        self.step = 0
        self._parallel = parallel
        self._forward: nn.Module = model if parallel is None else parallel
        self._update = update
        self._loss = loss
        self._world = world
        self._layout = layout
        self._precision = precision
        self._grad_clip = grad_clip
        self._seed = seed
        self._rate = rate
        self._scale = LossScale() if precision == "fp16" else None

    def train_step(self, batch: Batch) -> StepResult:
        """Run every micro-batch: forward, backward, synchronisation, clipping, update.

        The loss is normalised by the counted targets of the whole world, so unequal counts on
        ranks or in micro-batches weigh as they would in one process.
        """
        self.model.train()
        # A resumed run draws (dropout, say) what the uninterrupted one would have drawn.
        torch.manual_seed((self._seed * 1_000_003 + self.step) * 65_537 + self._world.rank)
        tokens = (batch.targets != IGNORE_INDEX).sum()
        counting = self._sum_async(tokens)
        factor: Tensor | None = None
        total = torch.zeros((), device=self._world.device)
        for micro_batch, last in self._micro_batches(batch):
            with self._synchronised(last):
                loss = self._micro_loss(micro_batch)
                if factor is None:
                    _wait(counting)
                    # Gradients are averaged over the data ranks, but the losses must be summed.
                    factor = (self._layout.data_ranks / tokens.clamp(min=1)).to(loss)
                scaled = loss * factor
                total += scaled.detach()
                (scaled if self._scale is None else scaled * self._scale.value).backward()
        summing = self._sum_async(total := total / self._layout.data_ranks)
        norm, skipped = self._apply()
        _wait(summing)
        self.step += 1
        return StepResult(total, tokens, norm, skipped)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return ``[sum of losses, counted targets]`` of this rank's batch, fp64."""
        self.model.eval()
        counted = (batch.targets != IGNORE_INDEX).sum()
        loss = sum(self._micro_loss(micro).double() for micro, _ in self._micro_batches(batch))
        return torch.stack([torch.as_tensor(loss).cpu(), counted.double()])

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs; every rank of the world calls it with the same inputs."""
        self.model.eval()
        with self._autocast():
            outputs: Tensor = self._forward(inputs.to(self._world.device))
        return outputs

    def learning_rate(self) -> float:
        """Return the rate that the next step uses."""
        return self._rate(self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer states and counters; sharded ones as DTensors."""
        # Without fp16 there is no scale, told as 0: a run may go on in another precision.
        scale = self._scale or LossScale(value=0.0)
        counters = {
            "step": torch.tensor(self.step),
            "loss_scale": torch.tensor(scale.value, dtype=torch.float64),
            "good_steps": torch.tensor(scale.good_steps),
        }
        return {
            "model": model_state(self.model),
            "optimizer": self._update.state_dict(),
            "counters": counters,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that ``state_dict`` of any layout gave."""
        for name, tensor in model_state(self.model).items():
            if tensor is not state["model"][name]:
                tensor.copy_(state["model"][name])
        self._update.load_state_dict(state["optimizer"])
        counters = state["counters"]
        self.step = int(counters["step"])
        if self._scale is not None and float(counters["loss_scale"]) > 0:
            self._scale.value = float(counters["loss_scale"])
            self._scale.good_steps = int(counters["good_steps"])

    def _micro_loss(self, batch: Batch) -> Tensor:
        device = self._world.device
        with self._autocast():
            outputs = self._forward(batch.inputs.to(device, non_blocking=True))
            return self._loss(outputs, batch.targets.to(device, non_blocking=True))

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[Batch, bool]]:
        """Yield ``(micro-batch, whether it is the last)``."""
        size, samples = self._layout.micro_batch_size, len(batch.inputs)
        for start in range(0, samples, size):
            piece = slice(start, start + size)
            yield Batch(batch.inputs[piece], batch.targets[piece]), start + size >= samples

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """Replicas agree once, in the last backward; shards are reduced in each, to stay small."""
        if isinstance(self._parallel, DDP) and not last:
            return self._parallel.no_sync()
        return nullcontext()

    def _apply(self) -> tuple[Tensor | None, bool]:
        """Synchronise what backward has not, clip and update."""
        if isinstance(self._parallel, DDP) and self._parallel.sync is GradSyncStrategy.NO_SYNC:
            self._parallel.sync_gradients()
        self._update.collect_gradients()
        if self._scale is not None:
            self._update.scale_gradients(1.0 / self._scale.value)
        norm = None
        if self._grad_clip is not None or self._scale is not None:
            norm = self._update.clip_gradients(self._grad_clip)
        if self._scale is not None and norm is not None:
            overflowed = not bool(torch.isfinite(norm))
            self._scale.update(overflowed=overflowed)
            if overflowed:
                self._update.forget_gradients()
                return norm, True
        self._update.apply(learning_rate=self.learning_rate())
        return norm, False

    def _autocast(self) -> AbstractContextManager[object]:
        """Sharded parameters are gathered in the lower precision; whole ones are cast."""
        if isinstance(self._parallel, FSDP):
            return nullcontext()
        return autocast(self._precision, self._world.device)

    def _sum_async(self, tensor: Tensor) -> dist.Work | None:
        if self._world.world_size == 1:
            return None
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied parameter once."""
    kept = model.state_dict()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in kept}


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
