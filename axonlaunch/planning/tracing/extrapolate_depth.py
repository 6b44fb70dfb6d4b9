"""Estimates what a deep model's step holds from two shallow ones, to the byte.

Whatever a step holds at one of its moments is linear in the number of equal blocks, if moments
are paired by what runs and by their block, counted from the nearer end of the model. Blocks in
between hold what lies between their neighbours, so that the peak is at one of the paired ones.
Models whose blocks differ are refused: they have to be traced whole.

An example: if 50 MiB are held when block 1 begins its forward in a model of 4 blocks, and 53 in one
of 5, then 50 + 28 * 3 = 134 are in one of 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from axonlaunch.planning.tracing.storage_trace import Point, StorageTrace, TraceEvent, on_device

NEAR = 2
"""Blocks at each end of a shallow model: FSDP gathers one ahead while another's shards go out."""
SHALLOW = 2 * NEAR

_Name: TypeAlias = tuple[str | int, ...]


def watch_blocks(blocks: Mapping[int, Sequence[nn.Module]], trace: StorageTrace) -> None:
    """Begin an event of the trace wherever a block begins its forward or its backward.

    Args:
        blocks: Of each pipeline stage, in order.
        trace: What watches the step.
    """
    for stage, members in blocks.items():
        for index, block in enumerate(members):
            _watch(block, trace, stage, index, len(members) - 1 - index)


def peak(events: Iterable[TraceEvent]) -> tuple[Point, int]:
    """Return the moment at which the device holds most, and the most that the host ever does."""
    points = [point for event in events for point in event.points]
    return max(points, key=on_device), max(point[-1] for point in points)


def extrapolate(
    shallow: Sequence[TraceEvent], deeper: Sequence[TraceEvent], *, blocks: int
) -> list[TraceEvent]:
    """Return what a deeper model's events hold.

    Args:
        shallow: Of a model with ``SHALLOW`` blocks or more in each stage.
        deeper: Of a model with one block more in each stage.
        blocks: How many more than in ``shallow`` each stage has.

    Returns:
        Those at the ends of each stage.
    """
    deeper_events = _pair_events(deeper)
    extrapolated = []
    for name, event in _pair_events(shallow).items():
        other = deeper_events[name]
        pairs = [*zip(event.points, other.points, strict=False)]
        if len(event.points) != len(other.points):
            # An operation for each parameter, say: what they hold most is linear.
            pairs = [pairs[0], (max(event.points, key=on_device), max(other.points, key=on_device))]
        extrapolated.append(TraceEvent(name, [linear_extrapolate(a, b, blocks) for a, b in pairs]))
    return extrapolated


def linear_extrapolate(point: Iterable[int], other: Iterable[int], times: int) -> Point:
    """Return a deeper model's numbers from a shallow one's and those with one block more."""
    return tuple([a + times * (b - a) for a, b in zip(point, other, strict=True)])


def _pair_events(events: Sequence[TraceEvent]) -> dict[_Name, TraceEvent]:
    """Name events alike in models of different depths: by the block's place from the nearer end."""
    paired: dict[_Name, TraceEvent] = {}
    seen: dict[_Name, int] = {}
    for event in events:
        what, *where = event.name
        if where:
            stage, front, back = where
            assert isinstance(front, int)
            assert isinstance(back, int)
            if min(front, back) >= NEAR:
                continue
            where = [stage, "front", front] if front < NEAR else [stage, "back", back]
        name = (what, *where)
        seen[name] = seen.get(name, 0) + 1
        paired[(*name, seen[name])] = event
    return paired


def _watch(block: nn.Module, trace: StorageTrace, *where: int) -> None:
    def forward(*_: Any) -> None:
        trace.begin("forward", *where)

    def backward(*_: Any) -> None:
        trace.begin("backward", *where)

    def await_backward(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(backward)

    block.register_forward_pre_hook(forward)
    block.register_forward_hook(await_backward)
