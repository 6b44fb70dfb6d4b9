"""How much memory each rank of a run would hold, found by running its engine on nothing.

The real engine is built for one rank of each pipeline stage, in a world without the others and on
fake tensors, and does a step after its optimizer has made its states. What can't be traced
so is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.models import fake_tensor_cache
from axonlaunch.planning.memory import cuda_process
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.planning.tracing import cuda_attention, extrapolate_depth
from axonlaunch.planning.tracing.engine_categories import host_categories
from axonlaunch.planning.tracing.reduced_run import ReducedRun
from axonlaunch.planning.tracing.stage_trace import StageTrace
from axonlaunch.planning.tracing.storage_trace import CATEGORIES, TraceEvent
from axonlaunch.system import allocator_settings, forked_map


def estimate(config: RunConfig, *, exact: bool = False, ends: bool = False) -> Estimate:
    """Estimate the peak memory of every rank of a run.

    Bytes are those of live storages, as ``StorageTrace`` counts them, on a GPU with what kernels of
    attention and cuBLAS hold besides: all samples of a rank's step are counted as on its device,
    and what passes through the device on the way from and to host memory, a layer or a parameter
    at a time, is not. Of what is compiled it is the wrappers of kernels that are followed, which
    allocate. An evaluation, of as large micro-batches and without
    gradients, holds less than a step.

    Args:
        config: Checked, with ``launch.nproc`` resolved: the ranks of the world.
        exact: Whether to trace every block and micro-batch; else two shallow models stand for a
            deep one, which gives the same bytes wherever blocks are equal, and a short step in a
            short pipeline for a long one, which gives them to one activation between stages.
        ends: Whether to estimate only the first two places on the pp axis and the last: between
            them ranks hold less and less, if blocks are dealt out evenly.

    Raises:
        ConfigError: The run can't be traced.
    """
    reduced = ReducedRun.of(config)
    where: Sequence[int] = range(reduced.layout.pipeline)
    if ends:
        where = sorted({*where[:2], where[-1]})
    run = _Run(reduced, [StageTrace.of(reduced, place, exact=exact) for place in where])
    if len(run.places) > 1:
        run.trace(run.first)
    return run.estimate()


def estimate_fitting(
    config: RunConfig, *, memory: float, until: float | None = None
) -> Estimate | None:
    """Estimate the memory of a run, if it may fit: it takes less to see that one does not.

    Args:
        config: As for ``estimate``.
        memory: Bytes of a device that it may take.
        until: ``time.monotonic()`` at which it is given up; None: never.

    Returns:
        As ``estimate``; None where tensors alone leave no room for the rest.

    Raises:
        ConfigError: The run can't be traced.
        TimeoutError: It is ``until``.
    """
    reduced = ReducedRun.of(config)
    where = range(reduced.layout.pipeline)
    places = [StageTrace.of(reduced, place, exact=False) for place in where]
    run = _Run(reduced, places, until=until)
    run.trace(run.first)
    rest = cuda_process.besides(run.groups, config.hardware) if run.on_gpu else 0
    if run.highest(run.first).peak_bytes + rest > memory:
        return None
    return run.estimate()


@dataclass
class _Run:
    """A run, and what is known of it so far.

    Attributes:
        reduced: The run's.
        places: On the pp axis: those to estimate.
        until: ``time.monotonic()`` at which tracing is given up; None: never.
        done: What was traced and recorded.
    """

    reduced: ReducedRun
    places: list[StageTrace]
    until: float | None = None
    done: dict[Any, Any] = field(default_factory=dict)
    _steps: dict[Any, list[TraceEvent]] = field(default_factory=dict)
    _ranks: dict[int, RankEstimate] = field(default_factory=dict)

    @property
    def first(self) -> list[StageTrace]:
        """The first two places, one of which holds most, but for odd splits."""
        return self.places[:2]

    @property
    def on_gpu(self) -> bool:
        return cuda_attention.runs_on_gpu(self.reduced.config)

    @property
    def groups(self) -> list[int]:
        """Ranks of each communicator that a rank takes part in."""
        return cuda_process.communicator_sizes(self.reduced.layout)

    @property
    def workspaces(self) -> list[int]:
        """Bytes of cuBLAS's workspaces; none on a CPU."""
        return cuda_process.cublas_workspaces(self.reduced.config) if self.on_gpu else []

    def trace(self, places: Iterable[StageTrace], *, recorded: int | None = None) -> None:
        """Trace what is not traced yet of some places, and record one beside them."""
        runs: dict[Any, Callable[[], Any]] = {}
        if recorded is not None and ("process", recorded) not in self.done:  # the longest to run
            runs["process", recorded] = _recording_run(self.reduced, recorded)
        for place in places:
            runs |= {key: run for key, run in place.traces().items() if key not in self.done}
        results = forked_map.map_forked(
            [*runs.values()], memory=fake_tensor_cache.recipes, until=self.until
        )
        self.done.update(zip(runs, results, strict=True))

    def rank(self, place: StageTrace) -> RankEstimate:
        """Return what the first rank of a traced place holds."""
        if place.kind not in self._steps:
            self._steps[place.kind] = place.short_step(self.done)
        if place.place not in self._ranks:
            first = place.place * self.reduced.world_size // self.reduced.layout.pipeline
            estimated = _of_rank(
                place, first, self._steps[place.kind], self.done, workspaces=self.workspaces
            )
            self._ranks[place.place] = estimated
        return self._ranks[place.place]

    def estimate(self) -> Estimate:
        """Trace and record what is left, and return the estimate that follows from all of it."""
        traced = [place for place in self.places if place.traces().keys() <= self.done.keys()]
        likely = self.highest(traced).coords["pp"] if traced else 0
        self.trace(self.places, recorded=likely if self.on_gpu else None)
        highest = self.highest(self.places)
        hardware = self.reduced.config.hardware
        reserved = process_bytes = highest.peak_bytes
        context = communicators = 0
        if self.on_gpu:
            place = highest.coords["pp"]
            self.trace([], recorded=place)
            device = _process(
                highest.peak_bytes,
                self.done["process", place],
                groups=self.groups,
                hardware=hardware,
                workspaces=self.workspaces,
            )
            reserved, process_bytes = device.allocator, device.process
            context, communicators = device.context, device.communicators
        return Estimate(
            world_size=self.reduced.world_size,
            mesh=self.reduced.layout.axes,
            parameters=sum(p.numel() for p in self.reduced.model.parameters()),
            peak_bytes=highest.peak_bytes,
            reserved_bytes=reserved,
            process_bytes=process_bytes,
            context_bytes=context,
            communicator_bytes=communicators,
            ranks=[self.rank(place) for place in self.places],
        )

    def highest(self, places: Iterable[StageTrace]) -> RankEstimate:
        """Return the rank of traced places that holds most."""
        return max(map(self.rank, places), key=lambda rank: rank.peak_bytes)


def _recording_run(reduced: ReducedRun, place: int) -> Callable[[], cuda_process.DeviceRequests]:
    """Return the run that shows what a rank asks of its device, in a shorter step."""
    stage = StageTrace.of(reduced, place, exact=False)
    return partial(
        cuda_process.record,
        stage.short,
        rank=stage.short_rank,
        stages=stage.short.stages_of(stage.short_place),
        on_host=host_categories(reduced.config),
    )


def _process(
    peak_bytes: int,
    recorded: cuda_process.DeviceRequests,
    *,
    groups: list[int],
    hardware: HardwareConfig | None,
    workspaces: list[int],
) -> cuda_process.DeviceMemory:
    """Return what the process of the highest rank holds of a GPU.

    What the allocator keeps beside tensors is that of the shorter step.
    """
    memory = hardware.memory_bytes if hardware else None
    rest = cuda_process.besides(groups, hardware)
    return cuda_process.peak_device_memory(
        recorded,
        peak_bytes=peak_bytes,
        groups=groups,
        hardware=hardware,
        capacity=None if memory is None else max(0, memory - rest),
        settings=allocator_settings.settings_of_ranks(),
        workspaces=workspaces,
    )


def _of_rank(
    place: StageTrace,
    rank: int,
    short_step: list[TraceEvent],
    done: Mapping[Any, Any],
    *,
    workspaces: Sequence[int],
) -> RankEstimate:
    point, host = extrapolate_depth.peak(place.events(short_step, done))
    held = dict(zip(CATEGORIES, point, strict=False))
    held["temporary"] += sum(workspaces)
    return RankEstimate(
        rank=rank,
        coords=place.whole.layout.coordinates(rank),
        peak_bytes=sum(held.values()),
        host_bytes=host + place.rounding(done),
        breakdown=held,
        sharded_parameters=place.sharded_bytes(done),
        microbatch_bytes=place.left_by_forward(short_step),
        read_bytes=place.read(done),
    )
