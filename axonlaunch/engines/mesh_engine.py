"""The engine of all layouts: runs a step from micro-batches to the update on a mesh of ranks.

It combines the other modules of this package, which implement the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.averaging.gradient_bucket import broadcast_tensors
from axonlaunch.comm.mesh import Mesh
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import AnyBatch, Batch
from axonlaunch.engines.base import StepResult
from axonlaunch.engines.context.context import ContextAxis
from axonlaunch.engines.data_parallel.fsdp import FSDP
from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.data_parallel.replicas import Replicas
from axonlaunch.engines.forward_backward import ForwardBackward, Outputs
from axonlaunch.engines.optimizer.clipping import gradient_norm
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.engines.pipeline.tied_weights import TiedGradients
from axonlaunch.engines.precision.policy import LossScale, scale_counters
from axonlaunch.engines.tensor.outputs.losses import Losses
from axonlaunch.models.facts.flops import ModelFlops
from axonlaunch.models.modules.module_state import evaluating, model_state, persistent_buffers


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """Parameters of a step that do not depend on the layout.

    Attributes:
        seed: Seed of the model's random numbers in training.
        grad_clip: Maximum norm of the full model's gradient; None does not clip.
        rate: Maps ``(step, peak=...)`` to the learning rate of a parameter group with that peak.
        peak_rate: Peak learning rate of the optimizer.
    """

    seed: int
    grad_clip: float | None
    rate: Callable[..., float]
    peak_rate: float


class MeshEngine:
    """Trains a model on every data rank's share of the global batch.

    One class serves all layouts. The layout determines its parts; parts that a layout does not need
    are None or empty:

        layout                        passes     replicas   sharded           tied
        single                        local      None       ()                None
        ddp 4                         local      DDP        ()                None
        fsdp 4                        local      None       the model         None
        pipeline 2                    pipeline   None       ()                None
        fsdp 4 x pipeline 2           pipeline   None       a rank's stages   None
        the same, tied embeddings     pipeline   None       a rank's stages   on the two end ranks

    ``context`` is set if sequences are sharded, ``loss_scale`` with fp16, in any layout.
    """

    def __init__(
        self,
        passes: ForwardBackward,
        *,
        update: Update,
        replicas: Replicas | None,
        sharded: Sequence[FSDP],
        tied: TiedGradients | None,
        aliases: Mapping[str, str],
        losses: Losses,
        context: ContextAxis | None,
        input_multiple: int,
        num_parameters: int,
        flops: ModelFlops,
        world: World,
        mesh: Mesh,
        layout: Layout,
        loss_scale: LossScale | None,
        rule: StepRule,
        saves_frozen: bool = True,
    ) -> None:
        """Create an engine from an initialized model that is on its device and parallelized.

        Args:
            passes: Forward and backward of the model.
            update: Update of the parameters.
            replicas: Keeps full copies of the parameters equal; None without replicas.
            sharded: Parts of the model that are sharded by fully_shard.
            tied: Sums gradients of weights shared by two stages; None without such weights.
            aliases: ``{local name: name in the full model}`` of this rank's copies of weights that
                belong to another stage.
            losses: Loss function and output gathering.
            context: The ranks that share sequences; None if sequences are not sharded.
            input_multiple: Number that must divide the length of a sequence.
            num_parameters: Number of parameters of the full model.
            flops: Sizes of the full model that determine the FLOPs of a token.
            world: The ranks of the run.
            mesh: Mesh of the ranks, with this rank's position.
            layout: Layout of the run, with each rank's share of the batch.
            loss_scale: Loss scale of fp16; None with other precisions.
            rule: Parameters of a step that do not depend on the layout.
            saves_frozen: Whether ``state_dict`` includes frozen parameters.
        """
        self.step = 0
        self.num_parameters = num_parameters
        self.flops = flops
        self.modules = passes.modules
        self._passes = passes
        self._update = update
        self._replicas = replicas
        self._sharded = sharded
        self._tied = tied
        self._aliases = dict(aliases)
        self._losses = losses
        self._context = context
        self._multiple = input_multiple
        self._world = world
        self._mesh = mesh
        self._layout = layout
        self._scale = loss_scale
        self._rule = rule
        self._saves_frozen = saves_frozen
        self._pipeline: ProcessGroup | None = mesh.group("pp") if layout.pipeline > 1 else None
        self._buffers = [(m, name) for m in self.modules for name in persistent_buffers(m)]
        for module in self.modules:
            if not module.training:  # pretrained models start in eval mode; frozen parts keep it
                module.train()
        # All ranks of a tensor axis compute the same loss; only one reports it.
        self._reports_loss = passes.gives_outputs and mesh.coordinate("tp") == 0

    @property
    def loss_scale(self) -> float:
        """Factor of losses, and of gradients until ``update``; 1 except with fp16."""
        return 1.0 if self._scale is None else float(self._scale.value)

    def memory_stats(self) -> FSDPMemoryStats | None:
        """Return this rank's memory of sharded parameters; None without sharded parameters."""
        stats = [module.memory_stats() for module in self._sharded]
        return FSDPMemoryStats.combine(stats) if stats else None

    def train_step(self, batch: AnyBatch) -> StepResult:
        """Run every micro-batch: forward, backward, synchronization, clipping, update."""
        loss, tokens = self.backward(batch)
        norm, skipped = self.update()
        return StepResult(loss, tokens, norm, skipped)

    def backward(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Run forward and backward of every micro-batch and synchronize the gradients.

        The loss is normalized by the number of counted targets of the whole world, so unequal
        counts on ranks or in micro-batches have the same weights as in one process.

        Returns:
            Mean loss and number of counted targets over the world, 0-dim, the same on every rank.

        Raises:
            ConfigError: A parameter got no gradient, and buckets of gradients wait for it.
        """
        self._seed_draws()
        batch = self._local_part(batch)
        # Sum on the device; with a GPU, the host would otherwise wait for the other hosts.
        tokens = push_to(self._count(batch) * int(self._reports_loss), self._world.device)
        counting = self._sum_async(tokens)
        factor: Tensor | None = None

        def scaled(outputs: Outputs, micro_batch: Any) -> Tensor:
            nonlocal factor
            if factor is None:
                _wait(counting)
                # Gradients are averaged over the data ranks, but the losses must be summed.
                factor = self._layout.gradient_ranks / tokens.clamp(min=1)
            loss = self._losses.sum(outputs, micro_batch) * factor
            return loss if self._scale is None else loss * self._scale.value

        losses = self._passes.train(batch, loss=scaled)
        total = torch.zeros((), device=self._world.device)
        if self._reports_loss:
            total += torch.stack(losses).sum()
            total /= self._layout.gradient_ranks
            if self._scale is not None:
                total /= self._scale.value
        summing = self._sum_async(total)
        self._synchronise()
        _wait(counting)
        _wait(summing)
        return total, tokens

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield this rank's parameters by name in the full model; sharded ones as DTensors.

        Both copies of a weight shared by two pipeline stages have the same name.
        """
        self._update.finish()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield self._aliases.get(name, name), parameter

    def named_updated(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the update changes, by the same names: parameters or their rows.

        Rows are DTensors. The tensors have gradients from ``backward`` to ``update``.
        """
        for name, tensor in self._update.tensors.items():
            yield self._aliases.get(name, name), tensor

    def optimizer_states(self) -> Iterator[Tensor]:
        """Yield the optimizer's states, allocating missing ones; of both copies of tied weights."""
        yield from self._update.state_dict().values()

    @torch.no_grad()
    def evaluate(self, batch: AnyBatch) -> Tensor:
        """Return ``[sum of losses, counted targets]`` of this rank's batch, fp64.

        If several ranks compute the same samples, only one returns the sums, the others zeros. The
        result is on the device and is not waited for.
        """
        self._agree_on_buffers()
        batch = self._local_part(batch)
        with evaluating(self.modules):
            losses = self._passes.losses(batch, loss=self._losses.sum)
        if not self._reports_loss:
            return torch.zeros(2, dtype=torch.float64, device=self._world.device)
        total = torch.stack([loss.double() for loss in losses]).sum()
        return torch.stack([total, push_to(self._count(batch).double(), total.device)])

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs. Every rank of the world must call it with the same inputs."""
        length = inputs.shape[1] if self._multiple > 1 else 0
        if padding := -length % self._multiple:
            # Causal models do not look ahead, so padding at the end changes no earlier output.
            inputs = torch.nn.functional.pad(inputs, (0, padding))
        if self._context is not None:
            inputs = inputs[:, self._context.positions(inputs.shape[1])]
        with evaluating(self.modules), self._losses.whole_logits():
            outputs = self._losses.gather_outputs(self._passes.predict(inputs))
        if self._context is not None:
            outputs = self._context.join(outputs)
        return outputs[:, :length] if padding else outputs

    def learning_rate(self) -> float:
        """Return the learning rate of the next step; parameter groups may have other rates."""
        return self._rule.rate(self.step, peak=self._rule.peak_rate)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer states and counters; sharded ones as DTensors."""
        self._agree_on_buffers()
        counters = {"step": torch.tensor(self.step), **scale_counters(self._scale)}
        model = self._model_state()
        for name, parameter in () if self._saves_frozen else self.named_parameters():
            if not parameter.requires_grad:
                model.pop(name, None)
        optimizer: dict[str, Tensor] = {}
        for key, value in self._update.state_dict().items():
            optimizer.setdefault(self._state_name(key), value)
        if self._replicas is not None:
            self._replicas.agree([*model.values(), *optimizer.values()])
        return {"model": model, "optimizer": optimizer, "counters": counters}

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return only parameters and buffers, without allocating optimizer states."""
        self._agree_on_buffers()
        model = self._model_state()
        if self._replicas is not None:
            self._replicas.agree(model.values())
        return model

    def _model_state(self) -> dict[str, Tensor]:
        model: dict[str, Tensor] = {}
        for name, tensor in self._named_tensors().items():
            model.setdefault(self._aliases.get(name, name), tensor)
        return model

    @torch.no_grad()
    def load_model_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load parameters and buffers saved by ``model_state_dict``."""
        for name, tensor in self._named_tensors().items():
            saved = state[self._aliases.get(name, name)]
            if tensor is not saved:
                tensor.copy_(saved)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state saved by ``state_dict``, in any layout."""
        # Frozen parameters that are not saved already have their values.
        current = {} if self._saves_frozen else self._model_state()
        self.load_model_state_dict({**current, **state["model"]})
        saved_states = state["optimizer"]
        counters = state["counters"]
        self.step = int(counters["step"])
        self._update.load_state_dict(
            {key: saved_states[self._state_name(key)] for key in self._update.state_dict()}
        )
        if self._scale is not None:
            self._scale.load(counters)

    def gradient_norm(self) -> Tensor:
        """Return the norm of the full model's gradient, between ``backward`` and ``update``."""
        counted = [t for n, t in self._update.tensors.items() if n not in self._aliases]
        return gradient_norm(counted, across=self._pipeline)

    def update(self, *, known_norm: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Clip gradients and update; return their norm, and whether fp16 skipped the update."""
        self.step += 1
        norm = None
        if self._rule.grad_clip is not None or self._scale is not None:
            norm = self._update.clip_gradients(
                self._rule.grad_clip,
                norm=self.gradient_norm() if known_norm is None else known_norm,
                loss_scale=None if self._scale is None else self._scale.value,
            )
        overflowed = None
        if self._scale is not None and norm is not None:
            overflowed = self._scale.update(push_to(~torch.isfinite(norm), self._world.device))
        self._update.apply(
            rate=lambda peak: self._rule.rate(self.step - 1, peak=peak), skip=overflowed
        )
        if self._replicas is not None:
            self._replicas.after_update(step=self.step)
        return norm, overflowed

    def _synchronise(self) -> None:
        """Finish gradient synchronization: average replicas, collect rows, sum tied weights."""
        if self._replicas is not None:
            self._replicas.after_backward()
        self._update.collect_gradients()
        if self._tied is not None:
            self._tied.sync()

    def _local_part(self, batch: AnyBatch) -> AnyBatch:
        if self._context is None:
            return batch
        assert isinstance(batch, Batch)
        return self._context.split(batch)

    def _count(self, batch: AnyBatch) -> Tensor:
        return self._losses.count(batch, micro_batch_size=self._layout.micro_batch_size)

    def _agree_on_buffers(self) -> None:
        """Broadcast the first data rank's buffers; each rank updated them with other samples."""
        if self._layout.gradient_ranks == 1:
            return
        names = self._layout.mesh_axes(self._layout.division().sum_axes)
        axes = [axis for axis in reversed(names) if self._mesh.size(axis) > 1]
        for axis in axes:
            group = self._mesh.group(axis)
            first, members = group.ranks[0], group.torch_group
            buffers = [module.get_buffer(name) for module, name in self._buffers]
            broadcast_tensors(buffers, source=first, group=members)

    def _seed_draws(self) -> None:
        """Seed by step, so a resumed run has the random numbers of an uninterrupted one.

        Ranks of a tensor axis use the same seed, because they all compute the layers that are not
        sharded.
        """
        stream = self._layout.random_stream(self._world.rank)
        # torch accepts 64 bits, and a configured seed may use 63.
        torch.manual_seed(((self._rule.seed * 1_000_003 + self.step) * 65_537 + stream) % 2**63)

    def _named_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers by name, a tied parameter once."""
        self._update.finish()
        return {k: v for module in self.modules for k, v in model_state(module).items()}

    def _state_name(self, key: str) -> str:
        name, _, state = key.rpartition(".")
        return f"{self._aliases.get(name, name)}.{state}"

    def _sum_async(self, tensor: Tensor) -> dist.Work | None:
        if self._world.world_size == 1:
            return None
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work


def push_to(value: Tensor, device: torch.device) -> Tensor:
    """Copy a host value to a device without waiting for the device's pending work.

    A copy from pageable memory would start only after all earlier work of the device, so the host
    could launch the backward only after the whole forward.
    """
    if value.device == device:
        return value
    return value.pin_memory().to(device, non_blocking=True)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
