"""Estimates the peak memory of each rank by running its real engine on fake tensors.

For one rank at each position of the pp axis, the engine is built in a fake world without the other
ranks. It runs one step after the optimizer has created its states. A model that cannot be traced
this way is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.models.tensors.packed_blocks import logical_numel
from axonlaunch.planning.memory import cuda_process
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.planning.tracing.devices import cuda_attention
from axonlaunch.planning.tracing.engine_categories import host_categories
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.stage_trace import StageTrace
from axonlaunch.planning.tracing.storage_trace import CATEGORIES, TraceEvent
from axonlaunch.system.node import allocator_settings
from axonlaunch.system.processes import forked_map


def estimate(config: RunConfig, *, exact: bool = False, ends: bool = False) -> Estimate:
    """Estimate the peak memory of every rank of a run.

    Counted are live storages, as in ``StorageTrace``, and on a GPU the temporary buffers of
    attention kernels and cuBLAS. All samples of a rank's step count as device memory. Tensors that
    pass through the device on the way to and from host memory, one layer or parameter at a time, do
    not. Compiled code is followed through the wrappers of its kernels, which allocate. An
    evaluation with micro-batches of the same size needs less, because it computes no gradients.

    Args:
        config: Checked configuration with ``launch.nproc`` resolved to the number of ranks.
        exact: Whether to trace every block and micro-batch. Otherwise two shallow models represent
            a deep one, with the same result if blocks are equal, and a short step of a short
            pipeline represents a long one, with an error of one activation between stages.
        ends: Whether to estimate only the first two positions on the pp axis and the last one. In
            between, memory decreases with the position if blocks are distributed evenly.

    Raises:
        ConfigError: The run cannot be traced.
    """
    reduced = ReducedRun.of(config)
    pp_ranks: Sequence[int] = range(reduced.layout.pipeline)
    if ends:
        pp_ranks = sorted({*pp_ranks[:2], pp_ranks[-1]})
    run = _Run(reduced, [StageTrace.of(reduced, pp_rank, exact=exact) for pp_rank in pp_ranks])
    if len(run.stage_traces) > 1:
        run.trace(run.first_two)
    return run.estimate()


def estimate_fitting(
    config: RunConfig, *, memory: float, until: float | None = None
) -> Estimate | None:
    """Estimate the memory of a run, or stop early if it cannot fit.

    Args:
        config: Checked configuration with ``launch.nproc`` resolved to the number of ranks.
        memory: Bytes of device memory that the run may use.
        until: Deadline as a value of ``time.monotonic()``; None for no deadline.

    Returns:
        The estimate; None if the tensors, the CUDA context and NCCL already exceed ``memory``.

    Raises:
        ConfigError: The run cannot be traced.
        TimeoutError: The deadline has passed.
    """
    reduced = ReducedRun.of(config)
    pp_ranks = range(reduced.layout.pipeline)
    stage_traces = [StageTrace.of(reduced, pp_rank, exact=False) for pp_rank in pp_ranks]
    run = _Run(reduced, stage_traces, until=until)
    run.trace(run.first_two)
    other_bytes = (
        cuda_process.non_allocator_bytes(run.communicators, config.hardware) if run.on_gpu else 0
    )
    if run.highest(run.first_two).peak_bytes + other_bytes > memory:
        return None
    return run.estimate()


@dataclass
class _Run:
    """A run with the traces made so far.

    Attributes:
        reduced: Inputs of the dry runs.
        stage_traces: Positions on the pp axis to estimate.
        until: Deadline for tracing, as a value of ``time.monotonic()``; None for no deadline.
        results: Finished traces by ``TraceKey``, and recordings by ``("process", pp rank)``.
    """

    reduced: ReducedRun
    stage_traces: list[StageTrace]
    until: float | None = None
    results: dict[Any, Any] = field(default_factory=dict)
    _short_steps: dict[Any, list[TraceEvent]] = field(default_factory=dict)
    _ranks: dict[int, RankEstimate] = field(default_factory=dict)

    @property
    def first_two(self) -> list[StageTrace]:
        """The first two positions. Except for unusual splits, one of them has the highest peak."""
        return self.stage_traces[:2]

    @property
    def on_gpu(self) -> bool:
        return cuda_attention.runs_on_gpu(self.reduced.config)

    @property
    def communicators(self) -> cuda_process.Communicators:
        """NCCL communicators of a rank."""
        return cuda_process.communicators_of(self.reduced.config, self.reduced.layout)

    @property
    def workspaces(self) -> list[int]:
        """Bytes of cuBLAS's workspaces; none on a CPU."""
        return cuda_process.cublas_workspaces(self.reduced.config) if self.on_gpu else []

    def trace(self, stage_traces: Iterable[StageTrace], *, recorded: int | None = None) -> None:
        """Run the missing traces of some positions, and the recording of position ``recorded``."""
        runs: dict[Any, Callable[[], Any]] = {}
        if recorded is not None and ("process", recorded) not in self.results:  # the longest to run
            runs["process", recorded] = _recording_run(self.reduced, recorded)
        for stage in stage_traces:
            runs |= {key: run for key, run in stage.traces().items() if key not in self.results}
        results = forked_map.map_forked(
            [*runs.values()],
            task="tracing a step to estimate its memory",
            memory=fake_tensor_cache.recipes,
            until=self.until,
        )
        self.results.update(zip(runs, results, strict=True))

    def rank(self, stage: StageTrace) -> RankEstimate:
        """Return the estimate of the first rank at a traced position."""
        if stage.kind not in self._short_steps:
            self._short_steps[stage.kind] = stage.short_step(self.results)
        if stage.pp_rank not in self._ranks:
            first_rank = stage.pp_rank * self.reduced.layout.stride("pp")
            estimated = _rank_estimate(
                stage,
                first_rank,
                self._short_steps[stage.kind],
                self.results,
                workspaces=self.workspaces,
            )
            self._ranks[stage.pp_rank] = estimated
        return self._ranks[stage.pp_rank]

    def estimate(self) -> Estimate:
        """Run all missing traces and recordings, and return the estimate."""
        traced = [
            stage for stage in self.stage_traces if stage.traces().keys() <= self.results.keys()
        ]
        likely = self.highest(traced).coords["pp"] if traced else 0
        self.trace(self.stage_traces, recorded=likely if self.on_gpu else None)
        highest = self.highest(self.stage_traces)
        hardware = self.reduced.config.hardware
        reserved = process_bytes = highest.peak_bytes
        context = communicators = 0
        if self.on_gpu:
            pp_rank = highest.coords["pp"]
            self.trace([], recorded=pp_rank)
            # The unused memory that the allocator keeps is that of the shorter recorded step.
            device = cuda_process.peak_device_memory(
                self.results["process", pp_rank],
                peak_bytes=highest.peak_bytes,
                communicators=self.communicators,
                hardware=hardware,
            )
            reserved, process_bytes = device.allocator, device.process
            context, communicators = device.context, device.communicators
        return Estimate(
            world_size=self.reduced.world_size,
            mesh=self.reduced.layout.axes,
            parameters=sum(logical_numel(p) for p in self.reduced.model.parameters()),
            peak_bytes=highest.peak_bytes,
            reserved_bytes=reserved,
            process_bytes=process_bytes,
            context_bytes=context,
            communicator_bytes=communicators,
            ranks=[self.rank(stage) for stage in self.stage_traces],
        )

    def highest(self, stage_traces: Iterable[StageTrace]) -> RankEstimate:
        """Return the rank with the highest peak among traced positions."""
        return max(map(self.rank, stage_traces), key=lambda rank: rank.peak_bytes)


def _recording_run(
    reduced: ReducedRun, pp_rank: int
) -> Callable[[], cuda_process.ReplayedRequests]:
    """Return a function that records a rank's requests in a shorter step, and replays them.

    The replay is part of it, because the recording is larger than all other results of a trace.
    """
    stage = StageTrace.of(reduced, pp_rank, exact=False)
    config, memory = reduced.config, None
    if config.hardware is not None and config.hardware.memory_bytes is not None:
        communicators = cuda_process.communicators_of(config, reduced.layout)
        other_bytes = cuda_process.non_allocator_bytes(communicators, config.hardware)
        memory = max(0, config.hardware.memory_bytes - other_bytes)

    def record_and_replay() -> cuda_process.ReplayedRequests:
        recorded = cuda_process.record(
            stage.short,
            rank=stage.short_rank,
            stages=stage.short.stages_of(stage.short_pp_rank),
            on_host=host_categories(config),
        )
        return cuda_process.replay(
            recorded,
            capacity=memory,
            settings=allocator_settings.settings_of_ranks(),
            workspaces=cuda_process.cublas_workspaces(config),
        )

    return record_and_replay


def _rank_estimate(
    stage_trace: StageTrace,
    rank: int,
    short_step: list[TraceEvent],
    results: Mapping[Any, Any],
    *,
    workspaces: Sequence[int],
) -> RankEstimate:
    point, host = extrapolate_depth.peak(stage_trace.events(short_step, results))
    breakdown = dict(zip(CATEGORIES, point, strict=False))
    breakdown["temporary"] += sum(workspaces)
    return RankEstimate(
        rank=rank,
        coords=stage_trace.run.layout.coordinates(rank),
        peak_bytes=sum(breakdown.values()),
        host_bytes=host + stage_trace.page_locking_overhead(results),
        breakdown=breakdown,
        sharded_parameters=stage_trace.sharded_bytes(results),
        microbatch_bytes=stage_trace.left_by_forward(short_step),
        read_bytes=stage_trace.read_bytes(results),
    )
