"""A place of a run on the pipeline's axis, and the shorter and shallower runs that represent it.

A process that is forked for it builds a rank's real engine on nothing and traces one steady step.
What can't be traced so is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import torch

from axonlaunch.comm.backend import Backend
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import estimated_on
from axonlaunch.data.dataset import AnyBatch, MicroBatch
from axonlaunch.engines.base import Engine
from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.optimizer.clipping import local_part
from axonlaunch.models.build import initial_weights, spec_for
from axonlaunch.models.dtensor_regions import local_boxes
from axonlaunch.models.spec import ModelSpec
from axonlaunch.planning.tracing import (
    cuda_attention,
    extrapolate_depth,
    extrapolate_schedule,
    fake_world,
    gloo_buffers,
)
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.engine_categories import follow, host_categories
from axonlaunch.planning.tracing.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import CATEGORIES, Category, StorageTrace, TraceEvent
from axonlaunch.planning.tracing.untraceable import refusing_untraceable
from axonlaunch.system import allocator_settings

TraceKey: TypeAlias = tuple[int, tuple[int, ...]]
"""What distinguishes one trace of a run from another: the place, and blocks of each stage."""


@dataclass(frozen=True)
class Traced:
    """A step, and the bytes that a micro-batch brings before anything is computed.

    Attributes:
        events: The step's.
        fed: Samples and targets of a micro-batch; without a pipeline, where no action shows it,
            also its loss, which is kept.
        received: Buffers for what other stages give of one, by category.
        sharded: What the rank holds of parameters that are sharded; None where none are.
        read: Most bytes of host memory that reading initial weights takes at once.
        rounding: Bytes of host memory beside those of what is offloaded, as torch locks it.
    """

    events: list[TraceEvent]
    fed: int
    received: Mapping[Category, int]
    sharded: FSDPMemoryStats | None
    read: int = 0
    rounding: int = 0


@dataclass(frozen=True)
class StageTrace:
    """A place on the pp axis, and the shorter and shallower runs that represent it.

    Attributes:
        whole: The run.
        place: Its place there.
        short: A run of fewer micro-batches in a shorter pipeline.
        short_place: Of a rank like its own, there.
        spare: Blocks of each of its stages that need not be traced.
    """

    whole: ReducedRun
    place: int
    short: ReducedRun
    short_place: int
    spare: int

    @classmethod
    def of(cls, reduced: ReducedRun, place: int, *, exact: bool) -> Self:
        """Choose the runs that represent a place; with ``exact`` it is the whole run itself."""
        short, short_place = (reduced, place) if exact else reduced.reduce(place)
        spare = 0 if exact else short.spare_blocks(short.stages_of(short_place))
        return cls(reduced, place, short, short_place, spare if spare > 1 else 0)

    @property
    def short_rank(self) -> int:
        """The first rank of the place in the short run."""
        return self.short_place * self.short.world_size // self.short.layout.pipeline

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for places that the same short runs of the same depth represent."""
        return self.spare, *self._keys()

    def traces(self) -> dict[TraceKey, Callable[[], Traced]]:
        """Return the functions that trace, by trace key."""
        return {
            key: partial(trace_rank, self._without(fewer), self.short_rank)
            for key, fewer in self._keys().items()
        }

    def short_step(self, done: Mapping[TraceKey, Traced]) -> list[TraceEvent]:
        """Return the step of the short run, as deep as the place is."""
        traces = [done[key].events for key in self._keys()]
        return (
            extrapolate_depth.extrapolate(*traces, blocks=self.spare) if self.spare else traces[0]
        )

    def events(
        self, short_step: list[TraceEvent], done: Mapping[TraceKey, Traced]
    ) -> list[TraceEvent]:
        """Return the place's step."""
        trace = done[next(iter(self._keys()))]
        short, whole = self.short.layout, self.whole.layout
        micro_batches = whole.micro_batches - short.micro_batches
        in_a_round = whole.microbatches_per_round - short.microbatches_per_round
        more = dict.fromkeys(CATEGORIES, 0)
        more["activations"] = micro_batches * trace.fed
        for category, num_bytes in trace.received.items():
            more[category] += in_a_round * num_bytes
        events = [extrapolate_schedule.shifted(event, (*more.values(), 0)) for event in short_step]
        if whole.pipeline == 1 or short == whole:
            return events
        step = self.whole.schedule.actions[self.place]
        return extrapolate_schedule.extend_schedule(events, rounds=[step] * min(2, whole.rounds))

    def sharded_bytes(self, done: Mapping[TraceKey, Traced]) -> dict[str, int] | None:
        """Return bytes of the rank's sharded parameters, by name; None where there are none."""
        shallow, *deeper = (_of_parameters(done[key].sharded) for key in self._keys())
        if not deeper or not shallow:
            return shallow or None
        # They grow by as much with every block, as a moment of a step does.
        grown = extrapolate_depth.linear_extrapolate(
            shallow.values(), deeper[0].values(), self.spare
        )
        return dict(zip(shallow, grown, strict=True))

    def read(self, done: Mapping[TraceKey, Traced]) -> int:
        """Return the most bytes of host memory that reading initial weights takes at once."""
        return max(done[key].read for key in self._keys())

    def rounding(self, done: Mapping[TraceKey, Traced]) -> int:
        """Return what torch locks of host memory beside the bytes of what is offloaded."""
        shallow, *deeper = (done[key].rounding for key in self._keys())
        return shallow + self.spare * (deeper[0] - shallow) if deeper else shallow

    def left_by_forward(self, short_step: list[TraceEvent]) -> list[int]:
        """Return what a micro-batch leaves for its backward on each of the rank's stages."""
        if self.whole.layout.pipeline == 1:
            return []
        return [*extrapolate_schedule.left_by_forward(short_step).values()]

    def _keys(self) -> dict[TraceKey, int]:
        """Return the traces by how many blocks are left out of each stage of the rank.

        Of a rank with 10 blocks, 6 of them spare: one trace of 4 blocks and one of 5.
        """
        depths = (self.spare, self.spare - 1) if self.spare else (0,)
        return {(self.short_place, tuple(self._without(fewer).counts)): fewer for fewer in depths}

    def _without(self, blocks: int) -> ReducedRun:
        if not blocks:
            return self.short
        return self.short.without(blocks, self.short.stages_of(self.short_place))


def trace_rank(reduced: ReducedRun, rank: int) -> Traced:
    """Trace one rank's step; this process must be forked for it.

    Raises:
        ConfigError: It can't be traced.
    """
    trace = StorageTrace(
        on_host=host_categories(reduced.config),
        workspaces=_workspaces(reduced.config),
    )
    extrapolate_schedule.watch_actions(trace)
    world = fake_world.join_fake_world(rank=rank, world_size=reduced.world_size)
    if _is_on_gloo(reduced.config):
        fake_world.pass_for(Backend.GLOO)
    with refusing_untraceable(reduced.config):
        dry = FakeRank(reduced, world, trace=trace)
        batch, spec = dry.batch(), spec_for(reduced.config)
        with dry.storing():
            dry.settle()
            measure_stage(dry.engine, batch, trace, spec=spec, updating=fake_world.assume_true)
    layout = reduced.layout
    micro_batches: Iterator[MicroBatch] = batch.micro_batches(layout.micro_batch_size)
    fed = next(micro_batches).nbytes // layout.context
    if layout.pipeline == 1:
        fed += torch.float32.itemsize
    read = _most_read_at_once(dry.engine) if initial_weights(reduced.config.model) else 0
    rounding = _locked_besides(dry.engine, reduced.config)
    return Traced(trace.events, fed, dry.received, dry.engine.memory_stats(), read, rounding)


def _workspaces(config: RunConfig) -> cuda_attention.Workspaces:
    return gloo_buffers.of_collective if _is_on_gloo(config) else cuda_attention.workspaces(config)


def _is_on_gloo(config: RunConfig) -> bool:
    return estimated_on(config) == "gloo"


def _most_read_at_once(engine: Engine) -> int:
    """Return the bytes of the largest box of a parameter that a rank reads, of fp32 at most.

    What is read goes into the parameter, and only then is the next read. The few parameters that a
    model's authors compute from several tensors are read whole.
    """
    tensors = (tensor for _, tensor in engine.named_parameters() if tensor.ndim)
    boxes = (box for tensor in tensors for box in local_boxes(tensor))
    sizes = (math.prod(length for _, length in box.region) for box in boxes)
    return torch.float32.itemsize * max(sizes, default=0)


def _locked_besides(engine: Engine, config: RunConfig) -> int:
    """Return what torch's allocator of page-locked memory adds to what is offloaded.

    fully_shard locks each parameter and each gradient by it; states have memory of their own size.
    """
    if estimated_on(config) != "gpu" or "parameters" not in host_categories(config):
        return 0
    locked = allocator_settings.settings_of_ranks().page_locked
    sizes = [
        (local_part(tensor).nbytes, 1 + tensor.requires_grad)
        for _, tensor in engine.named_parameters()
    ]
    return sum(blocks * (locked(size) - size) for size, blocks in sizes)


def _of_parameters(stats: FSDPMemoryStats | None) -> dict[str, int]:
    if stats is None:
        return {}
    return {
        "current_bytes": stats.current_bytes,
        "peak_bytes": stats.peak_bytes,
        "total_bytes": stats.total_bytes,
    }


def measure_stage(
    engine: Engine,
    batch: AnyBatch,
    trace: StorageTrace,
    *,
    spec: ModelSpec,
    updating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Do a step in an entered trace and leave it with the step's events.

    Args:
        engine: A rank's, whose optimizer has its states.
        batch: The rank's samples of a step.
        trace: What follows storages.
        spec: The model's.
        updating: What surrounds the update.
    """
    follow(engine, trace)
    blocks = {n: [*spec.blocks(module).values()] for n, module in enumerate(engine.modules)}
    extrapolate_depth.watch_blocks(blocks, trace)
    step(engine, batch, trace, updating=updating)


def step(
    engine: Engine,
    batch: AnyBatch,
    trace: StorageTrace,
    *,
    updating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Do a step once more in the trace of one that was measured, and leave it with its events."""
    trace.forget()
    engine.backward(batch)
    trace.begin("update")
    with trace.during("temporary"), updating():
        engine.update()
    trace.finish()
