"""Estimates the device memory of a CUDA process that runs a rank.

This is the memory reserved by the allocator, which follows from the run, plus the CUDA context and
NCCL, which are constants from ``measured_constants``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from axonlaunch.config import RunConfig
from axonlaunch.config.axes import DP_REPLICATE, EXPERT, EXPERT_SHARD, LIKE_DATA
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.engines.optimizer.copy_streams import left_before
from axonlaunch.models.build import spec_for
from axonlaunch.planning.measured_constants import (
    CUBLAS_THREADS,
    CUDA_CONTEXT,
    DETERMINISTIC_WORKSPACE,
    NCCL_PAIR,
    NCCL_PEER,
    NCCL_RING,
    SYMMETRIC_PAGE,
)
from axonlaunch.planning.memory.allocation_trace import LOSS, Recording, RecordingTrace
from axonlaunch.planning.memory.caching_allocator import Allocator, Change
from axonlaunch.planning.memory.extend_trace import FEWEST, Shortened, extended
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.devices import cuda_attention
from axonlaunch.planning.tracing.devices.update_copies import ParameterCopies, update_copies
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.engine_categories import categorize_gradients
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth
from axonlaunch.planning.tracing.extrapolation.extrapolate_chunks import ShortLosses
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import Category
from axonlaunch.planning.tracing.untraceable import refusing_untraceable
from axonlaunch.system.node.allocator_settings import AllocatorSettings
from axonlaunch.system.text.formatting import MIB

_COPY_STREAM, _RETURN_STREAM = -1, -2
"""Numbers of the streams that bring tensors from the host to an update, and back."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of device memory.

    Attributes:
        allocator: Reserved by torch's allocator, as in ``torch.cuda.max_memory_reserved``.
        context: CUDA context.
        communicators: Memory of NCCL.
        symmetric: Symmetric memory, which the ranks of a tensor axis read directly.
    """

    allocator: int
    context: int
    communicators: int
    symmetric: int = 0

    @property
    def process(self) -> int:
        """Total memory of the process, as in nvidia-smi."""
        return self.allocator + self.context + self.communicators + self.symmetric


@dataclass(frozen=True)
class Communicators:
    """NCCL communicators of a rank.

    Attributes:
        sizes: Number of ranks in each.
        exchange_peers: Number of ranks with which the rank exchanges all-to-all over NVLink, in
            each communicator that does so.
    """

    sizes: Sequence[int] = field(default_factory=list)
    exchange_peers: Sequence[int] = field(default_factory=list)


@dataclass(frozen=True)
class DeviceRequests:
    """Device memory that a rank requests.

    Attributes:
        changes: Requests to torch's allocator.
        symmetric: Bytes of symmetric memory, which the allocator does not provide.
        copies: Copies of host tensors that an update makes, in its order.
    """

    changes: list[Change]
    symmetric: int = 0
    copies: Sequence[ParameterCopies] = ()


@dataclass(frozen=True)
class ReplayedRequests:
    """Peaks of device memory while an allocator serves ``DeviceRequests``.

    Attributes:
        reserved: Bytes that the allocator reserves.
        live: Bytes of storages.
        symmetric: Bytes of symmetric memory, which the allocator does not provide.
    """

    reserved: int
    live: int
    symmetric: int = 0


def replay(
    recorded: DeviceRequests,
    *,
    capacity: int | None = None,
    settings: AllocatorSettings | None = None,
    workspaces: Sequence[int] = (),
) -> ReplayedRequests:
    """Let a simulated allocator serve recorded requests.

    Args:
        recorded: Device memory that the rank requests.
        capacity: Bytes of the device; None for unlimited memory.
        settings: Settings of the allocator; None for torch's defaults.
        workspaces: Bytes of each cuBLAS workspace, from ``cublas_workspaces``.
    """
    changes = [*(Change(-n, size) for n, size in enumerate(workspaces, 1)), *recorded.changes]
    changes += _copy_changes(recorded.copies, last_storage=-len(workspaces))
    allocator = Allocator(settings, capacity=capacity)
    allocator.replay(changes)
    return ReplayedRequests(allocator.peak_reserved, _peak_live_bytes(changes), recorded.symmetric)


def _copy_changes(copies: Sequence[ParameterCopies], *, last_storage: int) -> Iterator[Change]:
    """Yield the changes of the copies in two updates; the second reuses the memory of the first.

    Args:
        copies: Copies for each parameter.
        last_storage: Number of a storage below which numbers are unused.
    """
    counts = left_before(of_parameter.is_matrix for of_parameter in copies)
    for _ in range(2):
        held: deque[list[int]] = deque()
        num_left = 0
        for of_parameter, left in zip(copies, counts, strict=True):
            for _ in range(left - num_left):
                yield from (Change(storage, 0) for storage in held.popleft())
            num_left, storages = left, []
            for size in of_parameter.sizes:
                last_storage -= 1
                storages.append(last_storage)
                yield Change(last_storage, size, _COPY_STREAM)
            held.append(storages)
            if of_parameter.rounded:
                last_storage -= 1
                yield Change(last_storage, of_parameter.rounded, _RETURN_STREAM)
                yield Change(last_storage, 0, _RETURN_STREAM)
        yield from (Change(storage, 0) for storages in held for storage in storages)


def peak_device_memory(
    replayed: ReplayedRequests,
    *,
    peak_bytes: int,
    communicators: Communicators,
    hardware: HardwareConfig | None = None,
) -> DeviceMemory:
    """Return the peak device memory of a process.

    Args:
        replayed: Peaks of the requests of the rank.
        peak_bytes: Peak of the rank's tensors and workspaces. If the replayed peak is lower, for
            example because an extended recording lacks some buckets, the difference is added.
        communicators: Communicators of the rank.
        hardware: Description of the device; None uses constants measured on other devices.
    """
    return DeviceMemory(
        allocator=replayed.reserved + max(0, peak_bytes - replayed.live),
        context=context_bytes(hardware),
        communicators=communicator_bytes(communicators, hardware),
        symmetric=replayed.symmetric,
    )


def cublas_workspaces(config: RunConfig) -> list[int]:
    """Return the bytes of the cuBLAS workspace of each thread that runs matrix products."""
    size = int((config.hardware or HardwareConfig(name="")).cublas_workspace_mib * MIB)
    return [DETERMINISTIC_WORKSPACE if config.train.deterministic else size] * CUBLAS_THREADS


def non_allocator_bytes(
    communicators: Communicators, hardware: HardwareConfig | None = None
) -> int:
    """Return the device memory of the CUDA context and NCCL, outside torch's allocator."""
    return context_bytes(hardware) + communicator_bytes(communicators, hardware)


def context_bytes(hardware: HardwareConfig | None = None) -> int:
    """Return the bytes of the CUDA context of a process, with its loaded kernels."""
    if hardware is None or hardware.context_mib is None:
        return CUDA_CONTEXT
    return int(hardware.context_mib * MIB)


def communicator_bytes(communicators: Communicators, hardware: HardwareConfig | None = None) -> int:
    """Return the bytes that NCCL needs for communicators."""
    sizes = [size for size in communicators.sizes if size > 1]
    exchanges = sum(communicators.exchange_peers) * NCCL_PEER
    if hardware is None or hardware.communicator_mib is None:
        return sum(NCCL_PAIR if size == 2 else NCCL_RING for size in sizes) + exchanges
    return len(sizes) * int(hardware.communicator_mib * MIB) + exchanges


def communicators_of(config: RunConfig, layout: Layout) -> Communicators:
    """Return the NCCL communicators of a rank.

    - The world: torch creates its communicator when the device is known, in a pipeline with the
      first reduction.
    - Each axis of the mesh with more than one rank. A single such axis is the world.
    - Each axis that is merged into a data axis, which includes its ranks as well.
    - Axes of the experts' mesh, except for one that is the world.

    Not included are communicators between neighboring pipeline stages, which only carry messages,
    because NCCL's memory for them is not known.

    Args:
        config: Configuration of the run.
        layout: Layout of the run, which may be another one than the configuration's.
    """
    axis_sizes = [size for size in layout.mesh_sizes().values() if size > 1]
    world_size = math.prod(axis_sizes)
    sizes = [*axis_sizes] if len(axis_sizes) < 2 else [world_size, *axis_sizes]
    sizes += [layout.axes[name] for name in LIKE_DATA if layout.axes[name] > 1]
    if layout.expert > 1:
        of_experts = [layout.expert_axes[name] for name in (DP_REPLICATE, EXPERT_SHARD, EXPERT)]
        sizes += [size for size in of_experts if 1 < size < world_size]
    return Communicators(sizes, _exchange_peers(config, layout))


def _exchange_peers(config: RunConfig, layout: Layout) -> list[int]:
    """Return the number of ranks in a node with which a rank exchanges all-to-all, by axis.

    An expert axis sends tokens to experts. Muon gathers each matrix on one rank of each axis that
    shards it.
    """
    if config.hardware is not None and config.hardware.link not in (None, "nvlink"):
        return []
    in_node = RunNodes.of_devices(config, math.prod(layout.axes.values())).ranks
    sizes_and_strides = [(layout.expert, 1)]
    if config.optimizer.name == "muon":
        sizes_and_strides += [(layout.tensor, 1), (layout.parameter_shards, layout.tensor)]
    peers = [min(size, max(1, in_node // stride)) - 1 for size, stride in sizes_and_strides]
    return [number for number in peers if number]


def record(
    reduced: ReducedRun, *, rank: int, stages: list[int], on_host: Collection[Category] = ()
) -> DeviceRequests:
    """Record a rank's requests to its device. Call this in a process forked for it.

    If blocks are equal, except for leading ones, a shallow model is run and its recording is
    extended. In the same way a few chunks of a loss stand for all of them.

    Args:
        reduced: Run to record.
        rank: Global rank.
        stages: Pipeline stages of the rank.
        on_host: Categories kept in host memory.
    """
    spare_blocks = reduced.spare_blocks(stages, needed=FEWEST)
    shallow = reduced.without(spare_blocks, stages) if spare_blocks else reduced
    # A split backward computes the gradients of hidden states and of the head at different times.
    splits_backward = SCHEDULES[reduced.layout.schedule].separate_weight_grad
    recorded = _record_steps(
        shallow,
        rank,
        on_host,
        spare_blocks=spare_blocks,
        most_chunks=None if splits_backward else FEWEST,
    )
    # A split backward may also visit blocks in an order that cannot be extended.
    with suppress(ValueError):
        return recorded.requests()
    return _record_steps(reduced, rank, on_host).requests()


def symmetric_memory(config: RunConfig, part: int) -> int:
    """Return the symmetric memory of matrix products that overlap with communication.

    torch uses one workspace outside its allocator, which grows to the largest request: one part of
    a gathered tensor, or two parts of a reduce-scattered tensor.

    Args:
        config: Configuration of the run.
        part: Bytes of the largest part.

    Source: PyTorch, ``torch/distributed/_symmetric_memory/__init__.py``,
    ``_pipelined_produce_and_all2all``.
    """
    if not config.strategy.tensor.async_collectives:
        return 0
    return -(-2 * part // SYMMETRIC_PAGE) * SYMMETRIC_PAGE


@dataclass(frozen=True)
class _RecordedSteps:
    """The recording of a rank.

    Attributes:
        config: Configuration of the run.
        recording: The requests, of a model that may lack blocks and chunks of its loss.
        stages: Numbers of missing and recorded blocks or chunks, by pipeline stage or ``LOSS``.
        copies: See ``DeviceRequests``; with those of blocks that the recorded model lacks.
    """

    config: RunConfig
    recording: Recording
    stages: dict[int, Shortened]
    copies: Sequence[ParameterCopies]

    def requests(self) -> DeviceRequests:
        """Return the requests of the complete model.

        Raises:
            ValueError: The recording cannot be extended.
        """
        symmetric = symmetric_memory(self.config, self.recording.max_reduced_bytes)
        changes = self.recording.changes
        if any(stage.missing for stage in self.stages.values()):
            changes = extended(self.recording, self.stages)
        return DeviceRequests(changes, symmetric, self.copies)


def _record_steps(
    reduced: ReducedRun,
    rank: int,
    on_host: Collection[Category],
    *,
    spare_blocks: int = 0,
    most_chunks: int | None = None,
) -> _RecordedSteps:
    """Record two steps, because the cached blocks of the first step affect the second.

    A pipeline runs only one, because its step is long.

    Args:
        reduced: Run to record.
        rank: Global rank.
        on_host: Categories kept in host memory.
        spare_blocks: Number of blocks that each stage of the rank lacks.
        most_chunks: Number of chunks of a loss to run at most; None for all.
    """
    trace = RecordingTrace(on_host=on_host, workspaces=cuda_attention.workspaces(reduced.config))
    world = fake_world.join_fake_world(
        rank=rank,
        world_size=reduced.world_size,
        expert_load=reduced.config.estimate.expert_load,
    )
    with refusing_untraceable(reduced.config):
        dry = FakeRank(reduced, world, trace=trace)
        return _run_steps(reduced, dry, trace, spare_blocks=spare_blocks, most_chunks=most_chunks)


def _run_steps(
    reduced: ReducedRun,
    dry: FakeRank,
    trace: RecordingTrace,
    *,
    spare_blocks: int,
    most_chunks: int | None,
) -> _RecordedSteps:
    spec = spec_for(reduced.config)
    blocks = {n: [*spec.blocks(module).values()] for n, module in enumerate(dry.engine.modules)}
    extrapolate_depth.watch_blocks(blocks, trace)
    batch = dry.batch()
    losses = ShortLosses(trace.visit_chunk, most=most_chunks)
    with dry.storing(losses.replace()):
        categorize_gradients(dry.engine, trace)
        if "optimizer" in trace.host:  # the first update would create the states on the device
            with trace.during("optimizer"):
                trace.tag(dry.engine.optimizer_states(), "optimizer")
        if reduced.layout.pipeline > 1:
            dry.settle()
        for _ in range(1 if reduced.layout.pipeline > 1 else 2):
            dry.engine.backward(batch)
            trace.begin("update")
            with trace.during("temporary"), fake_world.assume_true():
                dry.engine.update()
            trace.tag(dry.engine.optimizer_states(), "optimizer")
        recording = trace.recording(dry.engine, blocks)
        last_blocks = [stage[-1] for stage in blocks.values() if stage]
        copies = update_copies(
            reduced.config, dry.engine, last_blocks=last_blocks, lacking=spare_blocks
        )
    stages = {
        stage: Shortened(spare_blocks, len(members), reduced.leading or 0)
        for stage, members in blocks.items()
    }
    stages[LOSS] = Shortened(losses.missing, most_chunks or 0)
    return _RecordedSteps(reduced.config, recording, stages, copies)


def _peak_live_bytes(changes: Iterable[Change]) -> int:
    sizes: dict[int, int] = {}
    current = peak = 0
    for storage, num_bytes, _ in changes:
        current += num_bytes - sizes.pop(storage, 0)
        if num_bytes:
            sizes[storage] = num_bytes
        peak = max(peak, current)
    return peak
