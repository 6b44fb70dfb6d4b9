"""What a CUDA process is seen to hold while it runs a rank: the allocator's cache, and the rest.

The rest, in ``measured_constants``, does not follow from the run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from axonlaunch.config import RunConfig
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.config.layout import Layout
from axonlaunch.models.build import spec_for
from axonlaunch.planning.measured_constants import (
    CUBLAS_THREADS,
    CUDA_CONTEXT,
    DETERMINISTIC_WORKSPACE,
    NCCL_PAIR,
    NCCL_RING,
    SYMMETRIC_PAGE,
)
from axonlaunch.planning.memory.allocation_trace import Recording, RecordingTrace
from axonlaunch.planning.memory.caching_allocator import Allocator, Change
from axonlaunch.planning.memory.extend_trace import FEWEST, extended
from axonlaunch.planning.tracing import cuda_attention, extrapolate_depth, fake_world
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.engine_categories import follow_gradients
from axonlaunch.planning.tracing.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import Category
from axonlaunch.planning.tracing.untraceable import refusing_untraceable
from axonlaunch.system.allocator_settings import AllocatorSettings
from axonlaunch.system.formatting import MIB


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of device memory.

    Attributes:
        allocator: What ``torch.cuda.max_memory_reserved`` shows.
        context: The driver's.
        communicators: NCCL's.
        symmetric: What ranks of a tensor axis read of each other without it.
    """

    allocator: int
    context: int
    communicators: int
    symmetric: int = 0

    @property
    def process(self) -> int:
        """What nvidia-smi shows."""
        return self.allocator + self.context + self.communicators + self.symmetric


@dataclass(frozen=True)
class DeviceRequests:
    """What a rank asks of a device.

    Attributes:
        changes: Of its allocator.
        symmetric: Bytes that other ranks can read, beside it.
    """

    changes: list[Change]
    symmetric: int = 0


def peak_device_memory(
    recorded: DeviceRequests,
    *,
    peak_bytes: int,
    groups: Iterable[int],
    hardware: HardwareConfig | None = None,
    capacity: int | None = None,
    settings: AllocatorSettings | None = None,
    workspaces: Sequence[int] = (),
) -> DeviceMemory:
    """Return what a process holds at most.

    Args:
        recorded: What the rank asks of its device.
        peak_bytes: What its tensors and ``workspaces`` hold at most. What is missing of that in
            its ``changes``, as of buckets that an extended recording can't place, is held besides.
        groups: Sizes of the groups that the rank talks to.
        hardware: The device's figures; None: what was measured on others.
        capacity: Bytes of the device; None: without end.
        settings: The allocator's; None: torch's own.
        workspaces: As ``cublas_workspaces`` returns them.
    """
    changes = [*(Change(-n, size) for n, size in enumerate(workspaces, 1)), *recorded.changes]
    allocator = Allocator(settings, capacity=capacity)
    allocator.replay(changes)
    return DeviceMemory(
        allocator=allocator.peak_reserved + max(0, peak_bytes - _most(changes)),
        context=context_bytes(hardware),
        communicators=communicators(groups, hardware),
        symmetric=recorded.symmetric,
    )


def cublas_workspaces(config: RunConfig) -> list[int]:
    """Return the bytes that torch's allocator holds for each thread that multiplies."""
    size = int((config.hardware or HardwareConfig(name="")).cublas_workspace_mib * MIB)
    return [DETERMINISTIC_WORKSPACE if config.train.deterministic else size] * CUBLAS_THREADS


def besides(groups: Iterable[int], hardware: HardwareConfig | None = None) -> int:
    """Return bytes of a device that no allocator of torch's has: the context and NCCL's."""
    return context_bytes(hardware) + communicators(groups, hardware)


def context_bytes(hardware: HardwareConfig | None = None) -> int:
    """Return bytes that the driver holds for a process, its kernels included."""
    if hardware is None or hardware.context_mib is None:
        return CUDA_CONTEXT
    return int(hardware.context_mib * MIB)


def communicators(groups: Iterable[int], hardware: HardwareConfig | None = None) -> int:
    """Return bytes that NCCL holds for groups of these sizes."""
    sizes = [size for size in groups if size > 1]
    if hardware is None or hardware.communicator_mib is None:
        return sum(NCCL_PAIR if size == 2 else NCCL_RING for size in sizes)
    return len(sizes) * int(hardware.communicator_mib * MIB)


def communicator_sizes(layout: Layout) -> list[int]:
    """Return the ranks of each communicator that a rank takes part in.

    torch makes the world's as soon as it knows the device, under a pipeline with the first sum, and
    one for each axis of the mesh, unless the mesh is the world. Those of two neighboring stages,
    which carry messages alone, are left out: what NCCL holds for them is not known here. Ranks that
    share a sequence are part of a data axis, and have one of their own besides.
    """
    axes = dict(layout.axes)
    axes["dp_replicate" if layout.replicates_context else "dp_shard"] *= axes.pop("cp")
    split = [size for size in axes.values() if size > 1]
    world = [*split] if len(split) < 2 else [math.prod(split), *split]
    return [*world, *([layout.context] if layout.context > 1 else [])]


def record(
    reduced: ReducedRun, *, rank: int, stages: list[int], on_host: Collection[Category] = ()
) -> DeviceRequests:
    """Return what a rank asks of its device, in a process of its own.

    Where blocks are equal a shallow model is run and its recording extended.

    Args:
        reduced: The run's.
        rank: The global rank.
        stages: Its pipeline stages.
        on_host: As ``StorageTrace``'s.
    """
    spare = reduced.spare_blocks(stages, needed=FEWEST)
    if spare > 0:
        recording, counts = _run(reduced.without(spare, stages), rank, on_host)
        # A schedule that splits backwards goes through blocks in an order that can't be continued.
        with suppress(ValueError):
            changes = extended(recording, blocks=spare, counts=counts)
            return DeviceRequests(changes, symmetric_memory(reduced.config, recording.exchanged))
    recording, _ = _run(reduced, rank, on_host)
    return DeviceRequests(recording.changes, symmetric_memory(reduced.config, recording.exchanged))


def symmetric_memory(config: RunConfig, part: int) -> int:
    """Return what matrix products that exchange as they compute hold for other ranks to read.

    It is one workspace, which grows to the most that is asked of it and is no allocator's: a part
    of what is gathered, or two parts of what is summed and divided.

    Args:
        config: The run's.
        part: Bytes of the largest part.

    Source: PyTorch, ``torch/distributed/_symmetric_memory/__init__.py``,
    ``_pipelined_produce_and_all2all``.
    """
    if not config.strategy.tensor.async_collectives:
        return 0
    return -(-2 * part // SYMMETRIC_PAGE) * SYMMETRIC_PAGE


def _run(
    reduced: ReducedRun, rank: int, on_host: Collection[Category]
) -> tuple[Recording, dict[int, int]]:
    """Record two steps: what the first leaves behind decides where the second's storages go.

    Of a pipeline, whose step is long, it is one.
    """
    trace = RecordingTrace(on_host=on_host, workspaces=cuda_attention.workspaces(reduced.config))
    world = fake_world.join_fake_world(rank=rank, world_size=reduced.world_size)
    with refusing_untraceable(reduced.config):
        return _steps(reduced, FakeRank(reduced, world, trace=trace), trace)


def _steps(
    reduced: ReducedRun, dry: FakeRank, trace: RecordingTrace
) -> tuple[Recording, dict[int, int]]:
    spec = spec_for(reduced.config)
    blocks = {n: [*spec.blocks(part).values()] for n, part in enumerate(dry.engine.modules)}
    extrapolate_depth.watch_blocks(blocks, trace)
    batch = dry.batch()
    with dry.storing():
        if reduced.layout.pipeline > 1:
            dry.settle()
        for _ in range(1 if reduced.layout.pipeline > 1 else 2):
            dry.engine.backward(batch)
            trace.begin("update")
            with trace.during("temporary"), fake_world.assume_true():
                dry.engine.update()
            trace.tag(dry.engine.optimizer_states(), "optimizer")
            follow_gradients(dry.engine, trace)
        recording = trace.recording(dry.engine, blocks)
    return recording, {stage: len(members) for stage, members in blocks.items()}


def _most(changes: Iterable[Change]) -> int:
    sizes: dict[int, int] = {}
    now = most = 0
    for change in changes:
        now += change.num_bytes - sizes.pop(change.storage, 0)
        if change.num_bytes:
            sizes[change.storage] = change.num_bytes
        most = max(most, now)
    return most
