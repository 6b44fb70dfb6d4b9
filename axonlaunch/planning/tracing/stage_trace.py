"""Traces one steady step of a pipeline rank, using shorter and shallower runs that represent it.

A forked process builds the rank's real engine on fake tensors and traces a step. A model that
cannot be traced this way is an error.
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
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import estimate_device
from axonlaunch.data.datasets.dataset import AnyBatch, MicroBatch
from axonlaunch.engines.data_parallel.fsdp_memory import FSDPMemoryStats
from axonlaunch.engines.engine import Engine
from axonlaunch.models.build import spec_for
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.dtensor_regions import local_boxes
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.devices import cuda_attention, gloo_buffers
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.engine_categories import categorize_engine, host_categories
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth, extrapolate_schedule
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import CATEGORIES, Category, StorageTrace, TraceEvent
from axonlaunch.planning.tracing.untraceable import refusing_untraceable
from axonlaunch.system.node import allocator_settings

TraceKey: TypeAlias = tuple[int, tuple[int, ...]]
"""Identifies a trace of a run: position on the pp axis, and number of blocks of each stage."""


@dataclass(frozen=True)
class Traced:
    """Result of tracing one step.

    Attributes:
        events: Events of the step.
        input_bytes: Bytes of the samples and targets of one micro-batch. Without a pipeline, also
            of its loss, which is kept and which no traced action shows.
        received: Bytes of the receive buffers of one micro-batch, by category.
        sharded_parameters: Memory of the rank's sharded parameters; None if none are sharded.
        read_bytes: Peak of host memory for reading initial weights, in bytes.
        page_locking_overhead: Host memory in addition to the offloaded tensors, in bytes, because
            torch rounds up the size of page-locked memory.
    """

    events: list[TraceEvent]
    input_bytes: int
    received: Mapping[Category, int]
    sharded_parameters: FSDPMemoryStats | None
    read_bytes: int = 0
    page_locking_overhead: int = 0


@dataclass(frozen=True)
class StageTrace:
    """A position on the pp axis, and the shorter and shallower runs that represent it.

    Attributes:
        run: The run to estimate.
        pp_rank: Position of the estimated ranks on its pp axis.
        short: Run with fewer micro-batches and a shorter pipeline.
        short_pp_rank: Position of the representing rank on the pp axis of ``short``.
        spare_blocks: Number of blocks of each stage that need not be traced.
    """

    run: ReducedRun
    pp_rank: int
    short: ReducedRun
    short_pp_rank: int
    spare_blocks: int

    @classmethod
    def of(cls, reduced: ReducedRun, pp_rank: int, *, exact: bool) -> Self:
        """Choose the shorter and shallower runs that represent a position on the pp axis.

        Args:
            reduced: The run to estimate.
            pp_rank: Position on its pp axis.
            exact: Trace the full run instead.
        """
        short, short_pp_rank = (reduced, pp_rank) if exact else reduced.reduce(pp_rank)
        spare_blocks = 0 if exact else short.spare_blocks(short.stages_of(short_pp_rank))
        return cls(reduced, pp_rank, short, short_pp_rank, spare_blocks if spare_blocks > 1 else 0)

    @property
    def short_rank(self) -> int:
        """First rank of ``short`` at the position ``short_pp_rank``; it is the one traced."""
        return self.short_pp_rank * self.short.layout.stride("pp")

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for positions represented by the same short runs."""
        return self.spare_blocks, *self._removed_blocks()

    def traces(self) -> dict[TraceKey, Callable[[], Traced]]:
        """Return the functions that trace the runs, one or two runs of different depth."""
        return {
            key: partial(trace_rank, self._without(fewer), self.short_rank)
            for key, fewer in self._removed_blocks().items()
        }

    def short_step(self, done: Mapping[TraceKey, Traced]) -> list[TraceEvent]:
        """Return the events of the short run with the full number of blocks."""
        traces = [done[key].events for key in self._removed_blocks()]
        return (
            extrapolate_depth.extrapolate(
                *traces, blocks=self.spare_blocks, leading=self.short.leading or 0
            )
            if self.spare_blocks
            else traces[0]
        )

    def events(
        self, short_step: list[TraceEvent], done: Mapping[TraceKey, Traced]
    ) -> list[TraceEvent]:
        """Return the events of the full step at this position."""
        trace = done[next(iter(self._removed_blocks()))]
        short_layout, layout = self.short.layout, self.run.layout
        missing_in_step = layout.micro_batches - short_layout.micro_batches
        missing_per_round = layout.microbatches_per_round - short_layout.microbatches_per_round
        extra = dict.fromkeys(CATEGORIES, 0)
        extra["activations"] = missing_in_step * trace.input_bytes
        for category, num_bytes in trace.received.items():
            extra[category] += missing_per_round * num_bytes
        events = [extrapolate_schedule.shifted(event, (*extra.values(), 0)) for event in short_step]
        if layout.pipeline == 1 or short_layout == layout:
            return events
        step = self.run.schedule.actions[self.pp_rank]
        return extrapolate_schedule.extend_schedule(events, rounds=[step] * min(2, layout.rounds))

    def sharded_bytes(self, done: Mapping[TraceKey, Traced]) -> dict[str, int] | None:
        """Return memory statistics of the rank's sharded parameters; None if none are sharded."""
        shallow, *deeper = (
            _sharded_bytes(done[key].sharded_parameters) for key in self._removed_blocks()
        )
        if not deeper or not shallow:
            return shallow or None
        # They are linear in the number of blocks.
        grown = extrapolate_depth.linear_extrapolate(
            shallow.values(), deeper[0].values(), self.spare_blocks
        )
        return dict(zip(shallow, grown, strict=True))

    def read_bytes(self, done: Mapping[TraceKey, Traced]) -> int:
        """Return the peak of host memory for reading initial weights, in bytes."""
        return max(done[key].read_bytes for key in self._removed_blocks())

    def page_locking_overhead(self, done: Mapping[TraceKey, Traced]) -> int:
        """Return the host memory that page-locking needs in addition to offloaded tensors."""
        shallow, *deeper = (done[key].page_locking_overhead for key in self._removed_blocks())
        return shallow + self.spare_blocks * (deeper[0] - shallow) if deeper else shallow

    def left_by_forward(self, short_step: list[TraceEvent]) -> list[int]:
        """Return the bytes that a micro-batch keeps for backward on each of the rank's stages."""
        if self.run.layout.pipeline == 1:
            return []
        return [*extrapolate_schedule.left_by_forward(short_step).values()]

    def _removed_blocks(self) -> dict[TraceKey, int]:
        """Return the number of blocks to leave out of each stage of the rank, by trace key.

        An example: a rank with 10 blocks, 6 of them spare, has a trace of 4 blocks and one of 5.
        """
        depths = (self.spare_blocks, self.spare_blocks - 1) if self.spare_blocks else (0,)
        return {(self.short_pp_rank, tuple(self._without(fewer).counts)): fewer for fewer in depths}

    def _without(self, blocks: int) -> ReducedRun:
        if not blocks:
            return self.short
        return self.short.without(blocks, self.short.stages_of(self.short_pp_rank))


def trace_rank(reduced: ReducedRun, rank: int) -> Traced:
    """Trace one rank's step. Call this in a process that is forked for it.

    Raises:
        ConfigError: The model cannot be traced.
    """
    trace = StorageTrace(
        on_host=host_categories(reduced.config),
        workspaces=_workspaces(reduced.config),
    )
    extrapolate_schedule.watch_actions(trace)
    world = fake_world.join_fake_world(
        rank=rank,
        world_size=reduced.world_size,
        expert_load=reduced.config.estimate.expert_load,
    )
    if _is_on_gloo(reduced.config):
        fake_world.pretend_backend(Backend.GLOO)
    with refusing_untraceable(reduced.config):
        dry = FakeRank(reduced, world, trace=trace)
        batch, spec = dry.batch(), spec_for(reduced.config)
        with dry.storing():
            dry.settle()
            measure_stage(dry.engine, batch, trace, spec=spec, updating=fake_world.assume_true)
    layout = reduced.layout
    micro_batches: Iterator[MicroBatch] = batch.micro_batches(layout.micro_batch_size)
    input_bytes = next(micro_batches).nbytes // layout.divisor("sequences")
    if layout.pipeline == 1:
        input_bytes += torch.float32.itemsize
    read_bytes = (
        _most_read_at_once(dry.engine) if source_of(reduced.config).initial_weights() else 0
    )
    page_locking_overhead = _page_locking_overhead(dry.engine, reduced.config)
    return Traced(
        trace.events,
        input_bytes,
        dry.received,
        dry.engine.memory_stats(),
        read_bytes,
        page_locking_overhead,
    )


def _workspaces(config: RunConfig) -> cuda_attention.Workspaces:
    return (
        gloo_buffers.collective_buffers
        if _is_on_gloo(config)
        else cuda_attention.workspaces(config)
    )


def _is_on_gloo(config: RunConfig) -> bool:
    return estimate_device(config) == "gloo"


def _most_read_at_once(engine: Engine) -> int:
    """Return the size in fp32 of the largest region of a parameter that a rank reads.

    Regions are read one after the other into their parameters. A few parameters are computed from
    several tensors of the checkpoint; these tensors are read in full.
    """
    tensors = (tensor for _, tensor in engine.named_parameters() if tensor.ndim)
    boxes = (box for tensor in tensors for box in local_boxes(tensor))
    sizes = (math.prod(length for _, length in box.region) for box in boxes)
    return torch.float32.itemsize * max(sizes, default=0)


def _page_locking_overhead(engine: Engine, config: RunConfig) -> int:
    """Return the bytes that torch's allocator of page-locked memory adds to offloaded tensors.

    ``fully_shard`` allocates each parameter and gradient with it, which rounds sizes up. Optimizer
    states are page-locked at their exact size.
    """
    if estimate_device(config) != "gpu" or "parameters" not in host_categories(config):
        return 0
    locked = allocator_settings.settings_of_ranks().page_locked
    sizes = [
        (local_part(tensor).nbytes, 1 + tensor.requires_grad)
        for _, tensor in engine.named_parameters()
    ]
    return sum(blocks * (locked(size) - size) for size, blocks in sizes)


def _sharded_bytes(stats: FSDPMemoryStats | None) -> dict[str, int]:
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
    """Run one step and leave its events in ``trace``.

    Args:
        engine: Engine of a rank, with existing optimizer states.
        batch: Samples of the rank for one step.
        trace: Trace to record into; the caller has entered it.
        spec: Specification of the model.
        updating: Returns a context manager for the optimizer update.
    """
    categorize_engine(engine, trace)
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
    """Run one more step in a trace with categories, and leave only its events in the trace."""
    trace.forget()
    engine.backward(batch)
    trace.begin("update")
    with trace.during("temporary"), updating():
        engine.update()
    trace.finish()
