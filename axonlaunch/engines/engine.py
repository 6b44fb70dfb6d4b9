"""The interface that every engine offers the trainer, and the result of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from axonlaunch.data.datasets.dataset import AnyBatch
from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.expert.balance import ExpertLoad
from axonlaunch.models.facts.flops import ModelFlops


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step, the same on every rank.

    Attributes:
        loss: Mean over the counted targets of the whole world, 0-dim fp32.
        tokens: Number of counted targets of the whole world, 0-dim int64.
        grad_norm: Norm of the full model's gradient before clipping, 0-dim; None if not computed.
        skipped: fp16 only: 1 if gradients overflowed and the update was skipped, otherwise 0,
            0-dim; None with other precisions.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor | None
    skipped: Tensor | None


class Engine(Protocol):
    """Executes a parallelization strategy for one model: training, evaluation, and state."""

    step: int
    num_parameters: int
    flops: ModelFlops
    """Sizes of the full model that determine the FLOPs of a token."""
    modules: tuple[nn.Module, ...]
    """This rank's part of the model, one module per pipeline stage."""

    @property
    def loss_scale(self) -> float:
        """Factor of losses, and of gradients until ``update``; 1 except with fp16."""

    def train_step(self, batch: AnyBatch) -> StepResult:
        """Run every micro-batch and update: ``backward``, then ``update``."""

    def backward(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Run forward and backward and synchronize gradients; return (loss, counted targets)."""

    def forget_gradients(self) -> None:
        """Free the gradients of ``backward`` without an update."""

    def gradient_norm(self) -> Tensor:
        """Return the norm of the full model's gradient after ``backward``, 0-dim fp32.

        Replicas that do not average gradients have different norms.
        """

    def update(self, *, known_norm: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Clip and update; return the gradient norm, and whether fp16 skipped the update.

        Args:
            known_norm: Result of ``gradient_norm`` since ``backward``; None computes it if needed.
        """

    def expert_loads(self) -> dict[str, ExpertLoad]:
        """Return the load of each layer with experts in the last step, by the name of its experts.

        Every rank of the world must call it, and the host waits for the device.
        """

    def memory_stats(self) -> FSDPMemoryStats | None:
        """Return this rank's memory of sharded parameters; None without sharded parameters."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by name in the full model; sharded ones as DTensors."""

    def named_updated(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the update changes, with the same names.

        They are parameters, or DTensors of rows of parameters; after ``backward`` they have
        gradients. For a parameter that is complete on every rank, the gradient may cover only this
        rank's rows.
        """

    def update_groups(self) -> list[list[str]]:
        """Return the names of the updated tensors in each optimizer group, in the update's order.

        Options such as those of ``optimizer.groups`` make groups, so the order may not be that of
        the model.
        """

    def optimizer_states(self) -> Iterator[Tensor]:
        """Yield this rank's optimizer states, allocating those that do not exist yet."""

    def evaluate(self, batch: AnyBatch) -> Tensor:
        """Return the loss sum, the counted targets and metric sums of this rank's batch, fp64."""

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs. Every rank of the world must call it with the same inputs."""

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer states and counters; sharded ones as DTensors."""

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return only parameters and buffers, without allocating optimizer states."""

    def load_model_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load parameters and buffers saved by ``model_state_dict``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state saved by ``state_dict``, in any layout."""
