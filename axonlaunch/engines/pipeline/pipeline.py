"""Pipeline parallelism: stages of a model on different ranks, micro-batches passing through them.

torch's schedules do the work of a training step. Evaluation and prediction pass one micro-batch
after another from stage to stage; nothing here updates a parameter.

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
from axonlaunch.comm.argument_checks import device_of
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.process_group import default_group
from axonlaunch.engines.pipeline.dynamic_send import broadcast_tensor, receive_tensor, send_tensor
from axonlaunch.engines.pipeline.named_stage import NamedStage
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats
from axonlaunch.models.module_state import evaluating

MicrobatchLoss = Callable[[Tensor, Tensor], Tensor]

# Whatever a stage raises, torch's runtime logs the whole schedule, a line an action.
logging.getLogger(pipelining.schedules.__name__).setLevel(logging.CRITICAL)


class PipelineStage:
    """A part of a model and its place in the pipeline.

    Attributes:
        module: The part; maps what the stage before it gives to what the next one takes.
        index: Its place, from 0.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module = module
        self.index = index
        self.takes: Tensor | None = None
        self.gives: Tensor | None = None

    def __call__(self, x: Tensor, **beside: Tensor) -> Tensor:
        """Run the part on one micro-batch, and remember the shapes and types at its ends."""
        y: Tensor = self.module(x, **beside)
        self.meet(x, y)
        return y

    def meet(self, takes: Tensor, gives: Tensor) -> None:
        """Remember the shapes and types of what comes in and what goes out."""
        self.takes, self.gives = _without_values(takes), _without_values(gives)


class Pipeline:
    """The stages that this rank holds, and the schedule by which all ranks work through a batch.

    Attributes:
        stages: This rank's, by index.
        schedule: Who does what in which order.
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
        """Join a pipeline; every rank of the group calls this.

        Args:
            stages: This rank's parts of the model, on their device, by stage.
            schedule: The same on every rank.
            group: The ranks of the pipeline, in order; None is the whole world.
            boundaries: What each stage takes and gives of a micro-batch, shapes and types alone,
                if all are of one shape; None: a micro-batch is passed through the ranks to see.

        Raises:
            ValueError: The schedule is for another number of ranks, or gives this rank others.
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
        self._known = boundaries is not None
        for index, ends in (boundaries or {}).items():
            if index in self.stages:
                self.stages[index].meet(*ends)
        for stage in stages.values():
            stage.register_forward_hook(lambda module, inputs, output: _laid_out(output))
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
        """Make a pipeline of a list of modules, one a stage; every rank of the group calls this.

        Args:
            modules: All stages, in order; each rank keeps its own and moves it to its device.
            group: The ranks of the pipeline, in order; None is the whole world.
            schedule: A name of ``axonlaunch.config.schedule_rules.SCHEDULES``.
            microbatches: Parts that a batch is divided into; None: two a stage.

        Raises:
            ValueError: The stages can't be divided among the ranks, or the schedule refuses them.
        """
        group = group or default_group()
        if not modules or len(modules) % group.size:
            raise ValueError(
                f"{len(modules)} modules can't be divided among {group.size} ranks; pass "
                f"{group.size}, {2 * group.size} or another multiple"
            )
        order = PipelineSchedule(
            schedule,
            degree=group.size,
            microbatches=microbatches or 2 * len(modules),
            stages_per_rank=len(modules) // group.size,
        )
        device = device_of(group)
        mine = {index: modules[index].to(device) for index in order.stages_of(group.rank)}
        return cls(mine, schedule=order, group=group)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """This rank's parts of the model, in its order."""
        return tuple(stage.module for stage in self.stages.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters: what an optimizer here updates."""
        for module in self.modules:
            yield from module.parameters()

    @property
    def has_first(self) -> bool:
        """Whether this rank is fed the samples."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether this rank gives outputs and losses."""
        return self.schedule.num_stages - 1 in self.stages

    def step(self, inputs: Tensor, targets: Tensor, *, loss: MicrobatchLoss) -> Tensor:
        """Run forward and backward of a batch; gradients are added to the parameters'.

        Args:
            inputs: Samples [B, ...], read by the first stage's rank; the others need them only
                for their shape.
            targets: Their targets, read by the last stage's rank.
            loss: ``(outputs, targets)`` of a micro-batch to a 0-dim tensor.

        Returns:
            The sum of the micro-batches' losses, 0-dim fp32, on every rank.

        Raises:
            ValueError: The batch can't be divided into the schedule's micro-batches.
        """
        losses = self.run(inputs, targets, loss=loss)
        total = torch.zeros((), device=self.device)
        if losses:
            total = torch.stack(losses).sum().float()
        dist.broadcast(total, src=self._rank_of(-1), group=self.group.torch_group)
        return total

    def run(
        self, inputs: Tensor, targets: Tensor, *, loss: MicrobatchLoss, **beside: Tensor
    ) -> list[Tensor]:
        """Do as ``step`` does; return each micro-batch's loss on the last stage's rank, else [].

        Args:
            inputs: As ``step`` takes them.
            targets: As ``step`` takes them.
            loss: As ``step`` takes it.
            beside: What every stage's module takes by name, on the device, a row a sample.
        """
        count = self.schedule.microbatches
        if len(inputs) % count:
            raise ValueError(
                f"a batch of {len(inputs)} samples can't be divided into {count} micro-batches; "
                f"use a multiple of {count}"
            )
        piece = inputs[: len(inputs) // count]
        key = (piece.shape, piece.dtype)
        if key not in self._runs:
            self._runs[key] = self._schedule(piece)
        self._loss = loss
        losses: list[Tensor] = []
        try:
            self._runs[key].step(
                *([_laid_out(self._here(inputs))] if self.has_first else []),
                target=self._here(targets) if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
                **beside,
            )
        except RuntimeError as error:
            # torch wraps what a stage raised into a text about shapes.
            raise error.__cause__ or error from None
        return [of_microbatch.detach() for of_microbatch in losses]

    @torch.no_grad()
    def forward(self, inputs: Tensor, **beside: Tensor) -> Tensor | None:
        """Pass one micro-batch through all stages; return the outputs on the last one's rank."""
        x = self._here(inputs) if self.has_first else inputs
        order = self.schedule.rank_of_stage
        for index, stage in self.stages.items():
            if index and order[index - 1] != self.group.rank:
                x = receive_tensor(self.group.ranks[order[index - 1]], self.group)
            x = stage(x, **beside)
            if index < len(order) - 1 and order[index + 1] != self.group.rank:
                send_tensor(x, self.group.ranks[order[index + 1]], self.group)
        return x if self.has_last else None

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the last stage's outputs on every rank; all of them call this."""
        return broadcast_tensor(self.forward(inputs), self._rank_of(-1), self.group)

    def memory_stats(self) -> PipelineMemoryStats:
        """Return what each stage holds at most under the schedule, and the idle share."""
        return PipelineMemoryStats.from_schedule(self.schedule)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _rank_of(self, stage: int) -> int:
        return self.group.ranks[self.schedule.rank_of_stage[stage]]

    def _meet_in_evaluation(self, inputs: Tensor) -> None:
        """Pass one micro-batch through the stages for the shapes between them.

        torch's own inference would run it in training mode and move running statistics.
        """
        with evaluating(self.modules):
            self.forward(inputs)

    def _schedule(self, inputs: Tensor) -> Any:
        """Make torch's schedule for micro-batches of one shape."""
        if not self._known:
            self._meet_in_evaluation(inputs)
        if self.group.backend is Backend.NCCL:
            # Otherwise the first batch of a send and a receive connects the group, and waits for
            # ranks in whose schedule there is none.
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
        assert stage.takes is not None
        assert stage.gives is not None
        return NamedStage(
            stage.module,
            stage.index,
            self.schedule.num_stages,
            self.device,
            input_args=(stage.takes,),
            output_args=(stage.gives,),
            group=self.group.torch_group,
        )

    def _compute_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)


def _without_values(tensor: Tensor) -> Tensor:
    """Return shape and type of what passes between stages; gradients flow back if they can."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(empty.is_floating_point())


def _laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of its shape; torch compares them, also of one-row dims."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"a stage of the pipeline returned {type(tensor).__name__}; stages pass one tensor "
            "on: return one, or cut elsewhere by strategy.pipeline.split"
        )
    if tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
