"""What every engine offers the trainer, whatever its layout.

It holds the interface and the numbers of a step; no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from axonlaunch.data.dataset import AnyBatch
from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.models.flops import ModelFlops


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimizer step, the same on every rank.

    Attributes:
        loss: Mean over the counted targets of the whole world, 0-dim fp32.
        tokens: Counted targets of the whole world, 0-dim int64.
        grad_norm: Norm of the whole model's gradient before clipping, 0-dim; None if nobody asked.
        skipped: fp16 only: 1 where gradients overflowed, so that the update was left out, else 0,
            0-dim; None in another precision.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor | None
    skipped: Tensor | None


class Engine(Protocol):
    """Carries out a strategy for one model: a step, an evaluation, a state."""

    step: int
    num_parameters: int
    flops: ModelFlops
    """Sizes of the whole model, from which the cost of a token follows."""
    modules: tuple[nn.Module, ...]
    """This rank's part of the model, a module for each pipeline stage."""

    @property
    def loss_scale(self) -> float:
        """What losses, and so gradients until ``update``, are multiplied by: 1 but for fp16."""

    def train_step(self, batch: AnyBatch) -> StepResult:
        """Run every micro-batch and update: ``backward``, then ``update``."""

    def backward(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Run forward and backward and synchronise gradients; return the loss and the targets."""

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient after ``backward``, 0-dim fp32.

        Replicas that average no gradients have each their own.
        """

    def update(self, *, known_norm: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Clip and update; return the gradient's norm, and whether fp16 left the update out.

        Args:
            known_norm: What ``gradient_norm`` returned since ``backward``; None: it was not asked.
        """

    def memory_stats(self) -> FSDPMemoryStats | None:
        """Return what this rank holds of sharded parameters; None where none are."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank holds by its name in the whole model, divided ones as DTensors."""

    def named_updated(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the update changes here, by those names, with gradients after ``backward``.

        They are parameters, or DTensors of rows of them: of a parameter that is whole on each rank
        the gradient may be this rank's rows alone.
        """

    def optimizer_states(self) -> Iterator[Tensor]:
        """Yield the optimizer's states on this rank, made if they are not there yet."""

    def evaluate(self, batch: AnyBatch) -> Tensor:
        """Return ``[sum of losses, counted targets]`` of this rank's batch, fp64."""

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs; every rank of the world calls it with the same inputs."""

    def learning_rate(self) -> float:
        """Return the rate that the next step uses."""

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer states and counters; sharded ones as DTensors."""

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers alone, and make no optimizer states for it."""

    def load_model_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over parameters and buffers that ``model_state_dict`` gave."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that ``state_dict`` of any layout gave."""
