"""Extrapolates the memory of a deep model's step from the traces of two shallow ones.

The memory held at a given moment of a step is linear in the number of equal blocks, so the result
is exact to the byte. A moment is identified by the running operation and its block, counted from
the nearer end of the model. The memory of blocks in the middle is between that of their neighbors,
so the peak is at one of the extrapolated moments. Blocks before the equal ones, such as dense ones
before mixtures of experts, are traced as they are. Other models must be traced whole.

An example: 50 MiB are held when block 1 begins its forward in a model of 4 blocks, and 53 MiB in a
model of 5 blocks. In a model of 32 blocks, 50 + 28 * 3 = 134 MiB are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from axonlaunch.planning.tracing.storage_trace import Point, StorageTrace, TraceEvent, on_device

NEAR = 2
"""Blocks at each end of a shallow model.

Two are needed because FSDP gathers the next block while it reduces the previous one.
"""
SHALLOW = 2 * NEAR

_EventKey: TypeAlias = tuple[str | int, ...]


def watch_blocks(blocks: Mapping[int, Sequence[nn.Module]], trace: StorageTrace) -> None:
    """Begin a new event of the trace each time a block begins its forward or backward.

    Args:
        blocks: Blocks of each pipeline stage, in order.
        trace: Trace that watches the step.
    """
    for stage, members in blocks.items():
        for index, block in enumerate(members):
            _watch(block, trace, stage, index, len(members) - 1 - index)


def peak(events: Iterable[TraceEvent]) -> tuple[Point, int]:
    """Return the point with the most device memory, and the peak of host memory in bytes."""
    points = [point for event in events for point in event.points]
    return max(points, key=on_device), max(point[-1] for point in points)


def extrapolate(
    shallow: Sequence[TraceEvent], deeper: Sequence[TraceEvent], *, blocks: int, leading: int = 0
) -> list[TraceEvent]:
    """Return the events of a model with more blocks.

    Args:
        shallow: Events of a model with ``SHALLOW`` or more equal blocks in each stage.
        deeper: Events of a model with one block more in each stage.
        blocks: Number of blocks to add to each stage of ``shallow``.
        leading: Number of blocks before the equal ones.

    Returns:
        Events of the blocks near both ends of each stage.
    """
    deeper_events = _pair_events(deeper, leading)
    extrapolated = []
    for key, event in _pair_events(shallow, leading).items():
        other = deeper_events[key]
        pairs = [*zip(event.points, other.points, strict=False)]
        if len(event.points) != len(other.points):
            # For example one operation per parameter: only the maximum is linear.
            pairs = [pairs[0], (max(event.points, key=on_device), max(other.points, key=on_device))]
        extrapolated.append(TraceEvent(key, [linear_extrapolate(a, b, blocks) for a, b in pairs]))
    return extrapolated


def linear_extrapolate(point: Iterable[int], other: Iterable[int], times: int) -> Point:
    """Return ``point + times * (other - point)`` for each number.

    Args:
        point: Numbers of a shallow model.
        other: Numbers of the model with one block more.
        times: Number of blocks to add.
    """
    return tuple([a + times * (b - a) for a, b in zip(point, other, strict=True)])


def _pair_events(events: Sequence[TraceEvent], leading: int) -> dict[_EventKey, TraceEvent]:
    """Key events by name and block, so that models of different depths have the same keys.

    The block is counted from the nearer end of its stage. Events of middle blocks are left out.
    """
    near_front = leading + NEAR
    paired: dict[_EventKey, TraceEvent] = {}
    occurrences: dict[_EventKey, int] = {}
    for event in events:
        action, *location = event.name
        if location:
            stage, front, back = location
            assert isinstance(front, int)
            assert isinstance(back, int)
            if front >= near_front and back >= NEAR:
                continue
            location = [stage, "front", front] if front < near_front else [stage, "back", back]
        key = (action, *location)
        occurrences[key] = occurrences.get(key, 0) + 1
        paired[(*key, occurrences[key])] = event
    return paired


def _watch(block: nn.Module, trace: StorageTrace, *location: int) -> None:
    def forward(*_: Any) -> None:
        trace.begin("forward", *location)

    def backward(*_: Any) -> None:
        trace.begin("backward", *location)

    def await_backward(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(backward)

    block.register_forward_pre_hook(forward)
    block.register_forward_hook(await_backward)
