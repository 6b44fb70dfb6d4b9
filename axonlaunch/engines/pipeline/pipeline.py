"""Pipeline parallelism: ranks hold stages of a model, and micro-batches pass through them.

Training steps are executed by torch's schedules. Evaluation and prediction pass one micro-batch
after another from stage to stage. Parameters are not updated here.

Source: Huang et al., "GPipe", 2019; Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training" (1F1B), 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.comm.process_group import default_group
from axonlaunch.engines.pipeline.dynamic_send import broadcast_tensor, receive_tensor, send_tensor
from axonlaunch.engines.pipeline.named_stage import NamedStage
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats
from axonlaunch.models.modules.module_state import evaluating

MicrobatchLoss = Callable[[Tensor, Tensor], Tensor]

# When a stage raises an error, torch's runtime logs the whole schedule, one line per action.
logging.getLogger(pipelining.schedules.__name__).setLevel(logging.CRITICAL)


class PipelineStage:
    """One stage of a pipeline.

    Attributes:
        module: Part of the model; maps the previous stage's output to the next stage's input.
        index: Stage number, from 0.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module = module
        self.index = index
        self.input_meta: Tensor | None = None
        self.output_meta: Tensor | None = None

    def __call__(self, x: Tensor, **extra: Tensor) -> Tensor:
        """Run the stage on a micro-batch and record shapes and types of its input and output."""
        y: Tensor = self.module(x, **extra)
        self.record_shapes(x, y)
        return y

    def record_shapes(self, stage_input: Tensor, stage_output: Tensor) -> None:
        """Record the shapes and types of the stage's input and output."""
        self.input_meta, self.output_meta = _meta_copy(stage_input), _meta_copy(stage_output)


class Pipeline:
    """This rank's stages and the schedule by which all ranks process a batch.

    Attributes:
        stages: This rank's stages, by number.
        schedule: Order of the actions on each rank.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: PipelineSchedule,
        group: ProcessGroup | None = None,
        boundaries: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Create this rank's part of a pipeline. Every rank of the group must call it.

        Args:
            stages: This rank's parts of the model, on their device, by stage number.
            schedule: The schedule, the same on every rank.
            group: The ranks of the pipeline, in order; None for the whole world.
            boundaries: Input and output of each stage for one micro-batch, without values, if all
                micro-batches have the same shape. None passes a micro-batch through the ranks to
                find out.

        Raises:
            ValueError: The schedule is for a different number of ranks, or assigns other stages to
                this rank.
        """
        self.group = group or default_group()
        if schedule.degree != self.group.size:
            raise ValueError(
                f"degree={schedule.degree}: the group has {self.group.size} ranks; make a "
                f"PipelineSchedule with degree={self.group.size}"
            )
        expected = schedule.stages_of(self.group.rank)
        if tuple(sorted(stages)) != tuple(sorted(expected)):
            raise ValueError(
                f"stages {sorted(stages)}: {schedule.name} puts stages {sorted(expected)} on rank "
                f"{self.group.rank} of {self.group.size}; pass those"
            )
        self.schedule = schedule
        self.device = device_of(self.group)
        self.stages = {index: PipelineStage(stages[index], index) for index in sorted(stages)}
        self._shapes_known = self._shapes_fixed = boundaries is not None
        for index, boundary in (boundaries or {}).items():
            if index in self.stages:
                self.stages[index].record_shapes(*boundary)
        for stage in stages.values():
            stage.register_forward_hook(lambda module, inputs, output: _contiguous(output))
        self._runs: dict[tuple[torch.Size, torch.dtype], Any] = {}
        self._loss: MicrobatchLoss | None = None

    @classmethod
    def from_modules(
        cls,
        modules: Sequence[nn.Module],
        *,
        group: ProcessGroup | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
    ) -> Self:
        """Create a pipeline from a list of modules, one per stage. Every rank must call it.

        Args:
            modules: All stages in order; each rank keeps its stages and moves them to its device.
            group: The ranks of the pipeline, in order; None for the whole world.
            schedule: Name of a schedule in ``config.consistency.schedule_rules.SCHEDULES``.
            microbatches: Number of micro-batches per batch; None for two per stage.

        Raises:
            ValueError: The stages cannot be sharded over the ranks, or the schedule does not
                support their number.
        """
        group = group or default_group()
        if not modules or len(modules) % group.size:
            raise ValueError(
                f"{len(modules)} modules cannot be split among {group.size} ranks; pass "
                f"{group.size}, {2 * group.size} or another multiple"
            )
        order = PipelineSchedule(
            schedule,
            degree=group.size,
            microbatches=microbatches or 2 * len(modules),
            stages_per_rank=len(modules) // group.size,
        )
        device = device_of(group)
        local_stages = {index: modules[index].to(device) for index in order.stages_of(group.rank)}
        return cls(local_stages, schedule=order, group=group)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """This rank's parts of the model, in the model's order."""
        return tuple(stage.module for stage in self.stages.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages."""
        for module in self.modules:
            yield from module.parameters()

    @property
    def has_first(self) -> bool:
        """Whether this rank receives the samples."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether this rank computes outputs and losses."""
        return self.schedule.num_stages - 1 in self.stages

    def step(self, inputs: Tensor, targets: Tensor, *, loss: MicrobatchLoss) -> Tensor:
        """Run forward and backward of a batch; gradients are accumulated in the parameters.

        Args:
            inputs: Samples [B, ...], read by the first stage's rank; other ranks use only the
                shape.
            targets: Targets of the samples, read by the last stage's rank.
            loss: Maps ``(outputs, targets)`` of a micro-batch to a 0-dim tensor.

        Returns:
            Sum of the micro-batches' losses, 0-dim fp32, on every rank.

        Raises:
            ValueError: The batch cannot be divided into the schedule's micro-batches.
        """
        losses = self.run(inputs, targets, loss=loss)
        total = torch.zeros((), device=self.device)
        if losses:
            total = torch.stack(losses).sum().float()
        dist.broadcast(total, src=self._rank_of(-1), group=self.group.torch_group)
        return total

    def run(
        self, inputs: Tensor, targets: Tensor, *, loss: MicrobatchLoss, **extra: Tensor
    ) -> list[Tensor]:
        """Run ``step``, but return each micro-batch's loss on the last stage's rank, [] on others.

        Args:
            inputs: Samples, see ``step``.
            targets: Targets, see ``step``.
            loss: Loss of a micro-batch, see ``step``.
            extra: Keyword arguments of every stage's module, on the device, with one row per
                sample.
        """
        count = self.schedule.microbatches
        if len(inputs) % count:
            raise ValueError(
                f"a batch of {len(inputs)} samples cannot be split into {count} micro-batches; "
                f"use a multiple of {count}"
            )
        micro_batch = inputs[: len(inputs) // count]
        key = (micro_batch.shape, micro_batch.dtype)
        if key not in self._runs:
            self._runs[key] = self._schedule(micro_batch)
        self._loss = loss
        losses: list[Tensor] = []
        try:
            self._runs[key].step(
                *([_contiguous(self._here(inputs))] if self.has_first else []),
                target=self._here(targets) if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
                **extra,
            )
        except RuntimeError as error:
            # torch wraps the stage's exception in one with a text about shapes.
            raise error.__cause__ or error from None
        return [microbatch_loss.detach() for microbatch_loss in losses]

    @torch.no_grad()
    def forward(self, inputs: Tensor, **extra: Tensor) -> Tensor | None:
        """Pass one micro-batch through all stages; return the outputs on the last stage's rank."""
        x = self._here(inputs) if self.has_first else inputs
        order = self.schedule.rank_of_stage
        for index, stage in self.stages.items():
            if index and order[index - 1] != self.group.rank:
                like = stage.input_meta if self._shapes_fixed else None
                x = receive_tensor(self.group.ranks[order[index - 1]], self.group, like=like)
            x = stage(x, **extra)
            if index < len(order) - 1 and order[index + 1] != self.group.rank:
                peer = self.group.ranks[order[index + 1]]
                send_tensor(x, peer, self.group, is_known=self._shapes_fixed)
        return x if self.has_last else None

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the last stage's outputs on every rank. All ranks must call it."""
        return broadcast_tensor(self.forward(inputs), self._rank_of(-1), self.group)

    def memory_stats(self) -> PipelineMemoryStats:
        """Return the schedule's maximum live activations per stage and its idle fraction."""
        return PipelineMemoryStats.from_schedule(self.schedule)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _rank_of(self, stage: int) -> int:
        return self.group.ranks[self.schedule.rank_of_stage[stage]]

    def _infer_shapes(self, inputs: Tensor) -> None:
        """Pass one micro-batch through the stages to record the shapes between them.

        torch's shape inference would run in training mode and change running statistics.
        """
        with evaluating(self.modules):
            self.forward(inputs)

    def _schedule(self, inputs: Tensor) -> Any:
        """Create torch's schedule for micro-batches of one shape."""
        if not self._shapes_known:
            self._infer_shapes(inputs)
        if self.group.backend is Backend.NCCL:
            # Otherwise the first batched send and receive would initialize the communicator, and
            # wait for ranks that have none at that point of their schedule.
            dist.all_reduce(torch.zeros((), device=self.device), group=self.group.torch_group)
        stages = [self._torch_stage(stage) for stage in self.stages.values()]
        several = self.schedule.stages_per_rank > 1
        make: Any = self.schedule.torch_class
        multi = issubclass(make, pipelining.schedules.PipelineScheduleMulti)
        assert multi or not several
        return make(
            stages if multi else stages[0],
            self.schedule.microbatches,
            loss_fn=self._compute_loss,
            scale_grads=False,
        )

    def _torch_stage(self, stage: PipelineStage) -> NamedStage:
        assert stage.input_meta is not None
        assert stage.output_meta is not None
        return NamedStage(
            stage.module,
            stage.index,
            self.schedule.num_stages,
            self.device,
            input_args=(stage.input_meta,),
            output_args=(stage.output_meta,),
            group=self.group.torch_group,
        )

    def _compute_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)


def _meta_copy(tensor: Tensor) -> Tensor:
    """Return a tensor's shape and type on the meta device; requires a gradient if it can."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(empty.is_floating_point())


def _contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor. torch compares strides, even of dims of size 1."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"a pipeline stage returned {type(tensor).__name__}, but stages must return a tensor: "
            "change the module, or split elsewhere with strategy.pipeline.split"
        )
    if tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
