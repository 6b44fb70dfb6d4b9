"""The engine of all layouts: runs a step from micro-batches to the update on a mesh of ranks.

It combines the other modules of this package, which implement the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.averaging.gradient_bucket import broadcast_tensors
from axonlaunch.comm.mesh import Mesh
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import AnyBatch, Batch, MicroBatch
from axonlaunch.data.datasets.samples import CollatedSamples
from axonlaunch.engines.context.context import ContextAxis
from axonlaunch.engines.data_parallel.arriving_gradients import HostNorms
from axonlaunch.engines.data_parallel.fsdp import FSDP
from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.data_parallel.replicas import Replicas
from axonlaunch.engines.engine import StepResult
from axonlaunch.engines.expert.balance import ExpertCounts, ExpertLoad
from axonlaunch.engines.expert.experts import require_no_lost_rows
from axonlaunch.engines.forward_backward import ForwardBackward, Outputs
from axonlaunch.engines.optimizer.clipping import gradient_norm
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.engines.pipeline.tied_weights import TiedGradients
from axonlaunch.engines.precision.policy import LossScale, scale_counters
from axonlaunch.engines.precision.quantized_products import RoundingStart
from axonlaunch.engines.tensor.outputs.losses import Losses
from axonlaunch.engines.tensor.outputs.metric_sums import metric_sums
from axonlaunch.models.facts.flops import ModelFlops
from axonlaunch.models.modules.module_state import evaluating, model_state, persistent_buffers
from axonlaunch.models.specs.metrics import Metric
from axonlaunch.models.specs.model_spec import ModelOutputs
from axonlaunch.models.specs.router_loss import RouterLoss, RoutingMode


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


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Parts of an engine; the layout determines those with a default.

        layout                        passes     replicas   sharded           tied
        single                        local      None       ()                None
        ddp 4                         local      DDP        ()                None
        fsdp 4                        local      None       the model         None
        pipeline 2                    pipeline   None       ()                None
        fsdp 4 x pipeline 2           pipeline   None       a rank's stages   None
        the same, tied embeddings     pipeline   None       a rank's stages   on the two end ranks

    ``context`` is set if sequences are sharded, ``loss_scale`` with fp16, in any layout.

    Attributes:
        passes: Forward and backward of an initialized model that is on its device and parallelized.
        update: Update of the parameters.
        losses: Loss function and output gathering.
        rule: Parameters of a step that do not depend on the layout.
        world: The ranks of the run.
        mesh: Mesh of the ranks, with this rank's position.
        layout: Layout of the run, with each rank's share of the batch.
        num_parameters: Number of parameters of the full model.
        flops: Sizes of the full model that determine the FLOPs of a token.
        replicas: Keeps full copies of the parameters equal; None without replicas.
        sharded: Parts of the model that are sharded by fully_shard.
        tied: Sums gradients of weights shared by two stages; None without such weights.
        aliases: ``{local name: name in the full model}`` of this rank's copies of weights that
            belong to another stage.
        context: The ranks that share sequences; None if sequences are not sharded.
        input_multiple: Number that must divide the length of a sequence.
        loss_scale: Loss scale of fp16; None with other precisions.
        metrics: Metrics of evaluations.
        router_loss: Balancing loss of routers over the global batch; None without one.
        expert_counts: Tokens of each expert; None without experts.
        saves_frozen: Whether ``state_dict`` includes frozen parameters.
        rounding: Decides in which steps products are rounded.
        host_norms: Norms of gradients that arrive on the host; None without such gradients.
    """

    passes: ForwardBackward
    update: Update
    losses: Losses
    rule: StepRule
    world: World
    mesh: Mesh
    layout: Layout
    num_parameters: int
    flops: ModelFlops
    replicas: Replicas | None = None
    sharded: Sequence[FSDP] = ()
    tied: TiedGradients | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    context: ContextAxis | None = None
    input_multiple: int = 1
    loss_scale: LossScale | None = None
    metrics: Sequence[Metric] = ()
    router_loss: RouterLoss | None = None
    expert_counts: ExpertCounts | None = None
    saves_frozen: bool = True
    rounding: RoundingStart = field(default_factory=RoundingStart)
    host_norms: HostNorms | None = None


class MeshEngine:
    """Trains a model on every data rank's share of the global batch, in any layout."""

    def __init__(self, parts: EngineParts) -> None:
        """Create an engine at step 0.

        Args:
            parts: Parts of the engine.
        """
        self._parts = parts
        self.step = 0
        self.num_parameters = parts.num_parameters
        self.flops = parts.flops
        self.modules = parts.passes.modules
        pipelined = parts.layout.pipeline > 1
        self._pipeline: ProcessGroup | None = parts.mesh.group("pp") if pipelined else None
        self._buffers = [(m, name) for m in self.modules for name in persistent_buffers(m)]
        for module in self.modules:
            if not module.training:  # pretrained models start in eval mode; frozen parts keep it
                module.train()
        self._reports_outputs = parts.layout.reports_outputs(parts.world.rank)
        self._reports_loss = parts.passes.gives_outputs and self._reports_outputs

    @property
    def step(self) -> int:
        """Number of steps since the start of training."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._parts.rounding.begin(step)

    @property
    def loss_scale(self) -> float:
        """Factor of losses, and of gradients until ``update``; 1 except with fp16."""
        scale = self._parts.loss_scale
        return 1.0 if scale is None else float(scale.value)

    def memory_stats(self) -> FSDPMemoryStats | None:
        """Return this rank's memory of sharded parameters; None without sharded parameters."""
        stats = [module.memory_stats() for module in self._parts.sharded]
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
            ConfigError: A parameter got no gradient, and buckets of gradients wait for it. Or a
                custom loss returned no sum with a gradient.
        """
        parts, scale = self._parts, self._parts.loss_scale
        self._seed_draws()
        parts.update.begin_backward(rate=self._rate, step=self.step + 1)
        batch = self._local_part(batch)
        # Sum on the device; with a GPU, the host would otherwise wait for the other hosts.
        tokens = push_to(self._count(batch) * int(self._reports_loss), parts.world.device)
        counting = self._sum_async(tokens)
        factor: Tensor | None = None

        def scaled(outputs: Outputs, micro_batch: Any) -> Tensor:
            nonlocal factor
            if factor is None:
                _wait(counting)
                # Gradients are averaged over the data ranks, but the losses must be summed.
                factor = parts.layout.gradient_ranks / tokens.clamp(min=1)
            loss = parts.losses.sum(outputs, micro_batch) * factor
            if parts.router_loss is not None and (share := parts.router_loss.take()) is not None:
                loss = loss + share * parts.layout.gradient_ranks
            if parts.losses.custom is not None:
                parts.losses.custom.require_gradient(loss)
            return loss if scale is None else loss * scale.value

        self._count_choices(batch)
        with self._routing("share"), self._counting():
            losses = parts.passes.train(batch, loss=scaled)
        total = torch.zeros((), device=parts.world.device)
        if self._reports_loss:
            total += torch.stack(losses).sum()
            total /= parts.layout.gradient_ranks
            if scale is not None:
                total /= scale.value
        if parts.router_loss is not None and self._reports_outputs:
            attached = parts.router_loss.attached_loss()
            total += 0.0 if attached is None else attached
        summing = self._sum_async(total)
        self._synchronize()
        _wait(counting)
        _wait(summing)
        return total, tokens

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield this rank's parameters by name in the full model; sharded ones as DTensors.

        Both copies of a weight shared by two pipeline stages have the same name.
        """
        self._parts.update.finish()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield self._parts.aliases.get(name, name), parameter

    def named_updated(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the update changes, by the same names: parameters or their rows.

        Rows are DTensors. The tensors have gradients from ``backward`` to ``update``.
        """
        for name, tensor in self._parts.update.tensors.items():
            yield self._parts.aliases.get(name, name), tensor

    def update_groups(self) -> list[list[str]]:
        """Return the names of each optimizer group, in the order of the update."""
        aliases = self._parts.aliases
        return [
            [aliases.get(name, name) for name in group] for group in self._parts.update.groups()
        ]

    def optimizer_states(self) -> Iterator[Tensor]:
        """Yield the optimizer's states and masters, allocating missing ones.

        A weight that is tied across pipeline stages has two copies; those of both are yielded.
        """
        yield from self._parts.update.state_dict().values()
        yield from self._parts.update.masters().values()

    @torch.no_grad()
    def evaluate(self, batch: AnyBatch) -> Tensor:
        """Return the loss sum, the counted targets and metric sums of this rank's batch, fp64.

        The sums of all metrics follow one another. If several ranks compute the same samples, only
        one returns the sums, the others zeros. The result is on the device and is not waited for.

        Raises:
            ConfigError: A metric does not return a tensor of its sums.
        """
        parts = self._parts
        self._agree_on_buffers()
        local = self._local_part(batch)
        complete: Iterator[MicroBatch] = batch.micro_batches(parts.layout.micro_batch_size)

        def measure(outputs: Any, micro_batch: Any) -> Tensor:
            loss = parts.losses.evaluation_sum(outputs, micro_batch).double().reshape(1)
            if not parts.metrics:
                return loss
            is_complete = isinstance(micro_batch, CollatedSamples)
            full = micro_batch if is_complete else next(complete)
            return torch.cat([loss, self._metric_sums(outputs, full)])

        with evaluating(self.modules), parts.losses.evaluating(), self._routing("off"):
            measured = parts.passes.losses(local, loss=measure)
        if not self._reports_loss:
            num_sums = 2 + sum(metric.num_sums for metric in parts.metrics)
            return torch.zeros(num_sums, dtype=torch.float64, device=parts.world.device)
        sums = torch.stack(measured).sum(0)
        counted = push_to(self._count(local).double(), sums.device).reshape(1)
        return torch.cat([sums[:1], counted, sums[1:]])

    def _metric_sums(self, outputs: Any, batch: MicroBatch) -> Tensor:
        """Return the sums of the metrics of a complete micro-batch; zeros if another rank has them.

        Args:
            outputs: This rank's part of the outputs.
            batch: Complete micro-batch.
        """
        parts, context = self._parts, self._parts.context
        if isinstance(outputs, ModelOutputs):
            outputs = outputs.logits
        outputs = parts.losses.gather_outputs(outputs)
        if context is not None:
            outputs = context.join(outputs)
        sums = metric_sums(parts.metrics, outputs, batch, device=parts.world.device)
        return sums if context is None or context.is_first else torch.zeros_like(sums)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs. Every rank of the world must call it with the same inputs."""
        parts, context = self._parts, self._parts.context
        length = inputs.shape[1] if parts.input_multiple > 1 else 0
        if padding := -length % parts.input_multiple:
            # Causal models do not look ahead, so padding at the end changes no earlier output.
            inputs = torch.nn.functional.pad(inputs, (0, padding))
        if context is not None:
            inputs = inputs[:, context.positions(inputs.shape[1])]
        with evaluating(self.modules), parts.losses.whole_logits(), self._routing("off"):
            outputs = parts.losses.gather_outputs(parts.passes.predict(inputs))
        if context is not None:
            outputs = context.join(outputs)
        return outputs[:, :length] if padding else outputs

    def learning_rate(self) -> float:
        """Return the learning rate of the next step; parameter groups may have other rates."""
        rule = self._parts.rule
        return rule.rate(self.step, peak=rule.peak_rate)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters or masters, buffers, optimizer states and counters.

        Sharded tensors are DTensors.
        """
        self._agree_on_buffers()
        parts = self._parts
        counters = {"step": torch.tensor(self.step), **scale_counters(parts.loss_scale)}
        model = self._model_state()
        for name, parameter in () if parts.saves_frozen else self.named_parameters():
            if not parameter.requires_grad:
                model.pop(name, None)
        optimizer: dict[str, Tensor] = {}
        for key, value in parts.update.state_dict().items():
            optimizer.setdefault(self._state_name(key), value)
        if parts.replicas is not None:
            parts.replicas.agree([*model.values(), *optimizer.values()])
        return {"model": model, "optimizer": optimizer, "counters": counters}

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return only parameters and buffers, without allocating optimizer states."""
        self._agree_on_buffers()
        model = self._model_state()
        if self._parts.replicas is not None:
            self._parts.replicas.agree(model.values())
        return model

    def _model_state(self) -> dict[str, Tensor]:
        model: dict[str, Tensor] = {}
        for name, tensor in self._named_tensors().items():
            model.setdefault(self._parts.aliases.get(name, name), tensor)
        return model

    @torch.no_grad()
    def load_model_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load parameters and buffers saved by ``model_state_dict``."""
        for name, tensor in self._named_tensors().items():
            saved = state[self._parts.aliases.get(name, name)]
            if tensor is not saved:
                tensor.copy_(saved)
        self._parts.update.round_masters()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state saved by ``state_dict``, in any layout."""
        parts = self._parts
        # Frozen parameters that are not saved already have their values.
        current = {} if parts.saves_frozen else self._model_state()
        self.load_model_state_dict({**current, **state["model"]})
        saved_states = state["optimizer"]
        counters = state["counters"]
        self.step = int(counters["step"])
        parts.update.load_state_dict(
            {key: saved_states[self._state_name(key)] for key in parts.update.state_dict()}
        )
        if parts.loss_scale is not None:
            parts.loss_scale.load(counters)

    def forget_gradients(self) -> None:
        """Free the gradients of ``backward`` without an update."""
        self._parts.update.forget_gradients()

    def gradient_norm(self) -> Tensor:
        """Return the norm of the full model's gradient, between ``backward`` and ``update``."""
        tensors, aliases = self._parts.update.tensors, self._parts.aliases
        counted = [t for n, t in tensors.items() if n not in aliases]
        host_norms = self._parts.host_norms
        norms = None if host_norms is None else host_norms.take()
        return gradient_norm(counted, across=self._pipeline, computed=norms)

    def update(self, *, known_norm: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Clip gradients and update; return their norm, and whether fp16 skipped the update."""
        parts, rule, scale = self._parts, self._parts.rule, self._parts.loss_scale
        rate = self._rate
        self.step += 1
        norm = None
        if rule.grad_clip is not None or scale is not None:
            norm = parts.update.clip_gradients(
                rule.grad_clip,
                norm=self.gradient_norm() if known_norm is None else known_norm,
                loss_scale=None if scale is None else scale.value,
            )
        overflowed = None
        if scale is not None and norm is not None:
            overflowed = scale.update(push_to(~torch.isfinite(norm), parts.world.device))
        if parts.expert_counts is not None:
            parts.expert_counts.move_biases(skipped=overflowed)
        parts.update.apply(rate=rate, step=self.step, skip=overflowed)
        if parts.replicas is not None:
            parts.replicas.after_update(step=self.step)
        return norm, overflowed

    @property
    def _rate(self) -> Callable[[float], float]:
        """Function from the peak learning rate of parameters to their rate in the next step."""
        step, rule = self.step, self._parts.rule
        return lambda peak: rule.rate(step, peak=peak)

    def expert_loads(self) -> dict[str, ExpertLoad]:
        """Return the load of each layer with experts in the last step; empty without experts.

        Every rank of the world must call it, and the host waits for the device.

        Raises:
            LostRowsError: A registered dispatch dropped rows since the last call.
        """
        require_no_lost_rows(self.modules)
        counts = self._parts.expert_counts
        return {} if counts is None else counts.loads()

    def _count_choices(self, batch: AnyBatch) -> None:
        """Count the routers' choices before a step with several micro-batches or stages.

        The loss of the first micro-batch depends on the choices of the last one.
        """
        loss, layout = self._parts.router_loss, self._parts.layout
        if loss is None:
            return
        loss.begin_step()
        scale = self._parts.loss_scale
        loss.gradient = torch.full(
            (), float(layout.gradient_ranks), device=self._parts.world.device
        )
        if scale is not None:
            loss.gradient *= scale.value
        if layout.micro_batches == layout.pipeline == 1:
            return
        nothing = torch.zeros((), device=self._parts.world.device)
        with torch.no_grad(), loss.running("count"):
            self._parts.passes.losses(batch, loss=lambda *_: nothing)
        self._seed_draws()

    def _routing(self, mode: RoutingMode) -> AbstractContextManager[None]:
        loss = self._parts.router_loss
        return nullcontext() if loss is None else loss.running(mode)

    def _counting(self) -> AbstractContextManager[None]:
        counts = self._parts.expert_counts
        return nullcontext() if counts is None else counts.counting()

    def _synchronize(self) -> None:
        """Finish gradient synchronization: average replicas, collect rows, sum tied weights."""
        parts = self._parts
        if parts.replicas is not None:
            parts.replicas.after_backward()
        parts.update.collect_gradients()
        if parts.tied is not None:
            parts.tied.sync()

    def _local_part(self, batch: AnyBatch) -> AnyBatch:
        context = self._parts.context
        if context is None:
            return batch
        assert isinstance(batch, Batch)
        return context.split(batch)

    def _count(self, batch: AnyBatch) -> Tensor:
        parts = self._parts
        return parts.losses.count(batch, micro_batch_size=parts.layout.micro_batch_size)

    def _agree_on_buffers(self) -> None:
        """Broadcast the first data rank's buffers; each rank updated them with other samples."""
        layout, mesh = self._parts.layout, self._parts.mesh
        if layout.gradient_ranks == 1:
            return
        names = layout.mesh_axes(layout.division().sum_axes)
        axes = [axis for axis in reversed(names) if mesh.size(axis) > 1]
        for axis in axes:
            group = mesh.group(axis)
            first, members = group.ranks[0], group.torch_group
            buffers = [module.get_buffer(name) for module, name in self._buffers]
            broadcast_tensors(buffers, source=first, group=members)

    def _seed_draws(self) -> None:
        """Seed by step, so a resumed run has the random numbers of an uninterrupted one.

        Ranks of a tensor axis use the same seed, because they all compute the layers that are not
        sharded.
        """
        parts = self._parts
        stream = parts.layout.random_stream(parts.world.rank)
        # torch accepts 64 bits, and a configured seed may use 63.
        torch.manual_seed(((parts.rule.seed * 1_000_003 + self.step) * 65_537 + stream) % 2**63)

    def _named_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers by name, a tied parameter once.

        Parameters with masters are represented by them.
        """
        update = self._parts.update
        update.finish()
        tensors = {k: v for module in self.modules for k, v in model_state(module).items()}
        return tensors | update.masters()

    def _state_name(self, key: str) -> str:
        name, _, state = key.rpartition(".")
        return f"{self._parts.aliases.get(name, name)}.{state}"

    def _sum_async(self, tensor: Tensor) -> dist.Work | None:
        if self._parts.world.world_size == 1:
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
