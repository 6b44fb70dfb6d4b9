"""Describes the ranks of a pipeline for formulas: layers, ends, and micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.schedule_rules import SCHEDULES

_FORWARDS_FIRST = ("gpipe", "looped_bfs")
"""Schedules that run all forwards of a round before its backwards."""


@dataclass(frozen=True)
class PipelineRank:
    """The part of a model on a rank, and the activations that the rank holds.

    Attributes:
        layers: Number of layers in all stages of the rank.
        leading: Number of these that precede the repeated ones.
        has_first: Whether the rank has the first stage, with the embedding.
        has_last: Whether the rank has the last stage, with the head and the loss.
        in_flight: Number of micro-batches whose activations it holds before its first backward of
            a round; a micro-batch in some of its stages counts in proportion.
        during_backward: Such numbers later in the round, and the share of the rank's parameters
            that have a gradient by then.
        awaiting_weights: Further such numbers beside all gradients, if the schedule separates the
            gradients of weights: with the number of micro-batches whose gradients of weights are
            still to be computed.
        messages: Number of hidden states and gradients in messages: buffers that receive them, one
            of each for a micro-batch of a round and a stage, and those that were sent, if torch
            keeps them until the end of the round.
    """

    layers: int
    leading: int = 0
    has_first: bool = True
    has_last: bool = True
    in_flight: float = 1.0
    during_backward: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    awaiting_weights: tuple[tuple[float, float], ...] = ()
    messages: float = 0.0

    @classmethod
    def of(cls, layout: Layout, rank: int, *, layers: Sequence[int], leading: int) -> Self:
        """Return a rank of a pipeline.

        Args:
            layout: Parallel layout of the run.
            rank: Position on the pp axis.
            layers: Number of layers of each stage.
            leading: Number of layers of the model that precede the repeated ones.
        """
        stages = _stages_of(layout, rank)
        offsets = [sum(layers[:stage]) for stage in stages]
        has_first, has_last = 0 in stages, layout.num_stages - 1 in stages
        of_rank = [layers[stage] for stage in stages]
        waiting = _waiting(layout, rank, of_rank)
        return cls(
            layers=sum(layers[stage] for stage in stages),
            leading=sum(
                min(layers[stage], max(0, leading - first))
                for stage, first in zip(stages, offsets, strict=True)
            ),
            has_first=has_first,
            has_last=has_last,
            in_flight=waiting,
            during_backward=(*_during_backward(layout, waiting),),
            awaiting_weights=(*_awaiting_weights(layout, rank, of_rank),),
            messages=_messages(layout, waiting) * (2 * len(stages) - has_first - has_last),
        )


def stage_layers(depth: int, stages: int, head: float) -> tuple[int, ...]:
    """Return the number of layers of each stage as training has them: stages take equally long.

    Args:
        depth: Number of layers of the model.
        stages: Number of stages.
        head: Work of the head in the last stage, in layers.
    """
    if stages == 1 or depth < stages:
        return _evenly(depth, stages)
    mean = math.floor((depth + head) / stages - head)
    splits = [
        (*_evenly(depth - last, stages - 1), last) for last in {max(1, mean), max(1, mean + 1)}
    ]
    costs = {counts: [*counts[:-1], counts[-1] + head] for counts in splits}
    return min(splits, key=lambda counts: (max(costs[counts]), sum(c * c for c in costs[counts])))


def _evenly(depth: int, stages: int) -> tuple[int, ...]:
    """Give the blocks that remain to the last stages, which hold fewer micro-batches at once."""
    even, rest = divmod(depth, stages)
    return (even,) * (stages - rest) + (even + 1,) * rest


def _stages_of(layout: Layout, rank: int) -> list[int]:
    ranks, chunks = layout.pipeline, layout.stages_per_rank
    if SCHEDULES[layout.schedule].v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


def _waiting(layout: Layout, rank: int, layers: Sequence[int]) -> float:
    """Return the number of micro-batches that a rank runs ahead before its first backward.

    Sources: for 1F1B and interleaved 1F1B, Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters", 2021, section 2.2. For schedules that split the backward, Qi et al.,
    "Pipeline Parallelism with Controllable Memory", 2024, section 3: all ranks hold as many, until
    the gradients of weights are computed. Two directions overlap in half a micro-batch more. In a
    V, rank r of p holds 2 p - 1 - r of its first stage and r + 1 of its last.

    Args:
        layout: Parallel layout of the run.
        rank: Position on the pp axis.
        layers: Number of layers of each stage of the rank.
    """
    ranks, chunks = layout.pipeline, layout.stages_per_rank
    rule, in_round = SCHEDULES[layout.schedule], layout.microbatches_per_round
    if layout.schedule in _FORWARDS_FIRST:
        return in_round
    num_layers = sum(layers)
    if rule.v_shaped and num_layers:
        held = (2 * ranks - 1 - rank + int(rule.two_way), rank + 1)
        parts = zip(held, layers, strict=True)
        return sum(min(count, in_round) * part for count, part in parts) / num_layers
    if rule.separate_weight_grad:
        waiting = ranks + (1 / chunks if rule.two_way else 0.0)
    elif rule.in_rounds:
        waiting = (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) / chunks
    else:
        waiting = ranks - rank
    return min(waiting, in_round)


def _during_backward(layout: Layout, waiting: float) -> Iterator[tuple[float, float]]:
    """Yield the values of ``PipelineRank.during_backward``.

    If forwards remain, or backwards are split, forwards run beside all gradients. Otherwise the
    last stage of the rank runs all its backwards first: it frees a micro-batch before its gradients
    are complete, then all others, before the next stage has gradients.
    """
    chunks = layout.stages_per_rank
    is_split = SCHEDULES[layout.schedule].separate_weight_grad
    if is_split or waiting < layout.microbatches_per_round:
        yield waiting, 1.0
        return
    for done in range(chunks):
        yield waiting * (1 - done / chunks) - 1 / chunks, (done + 1) / chunks


def _messages(layout: Layout, waiting: float) -> float:
    """Return the number of micro-batches of a round, and of those whose sent tensors are kept.

    torch waits for the messages of schedules with several stages per rank at the end of a round.
    What micro-batches in flight have sent is counted among their activations.
    """
    in_round = layout.microbatches_per_round
    keeps_sent = SCHEDULES[layout.schedule].stages_per_rank > 1
    return in_round + (max(0.0, in_round - waiting) if keeps_sent else 0.0)


def _awaiting_weights(
    layout: Layout, rank: int, layers: Sequence[int]
) -> Iterator[tuple[float, float]]:
    """Yield the values of ``PipelineRank.awaiting_weights``; takes the arguments of ``_waiting``.

    In a steady state, a stage computes the gradients of its inputs beside all that the rank holds.
    At the end of a round, rank r of p computes them for up to r + 1 micro-batches of each stage
    before those of weights.
    """
    rule, in_round = SCHEDULES[layout.schedule], layout.microbatches_per_round
    ranks, total = layout.pipeline, sum(layers)
    if not rule.separate_weight_grad or not total:
        return

    def mean(*counts: int) -> float:
        """Return a number of micro-batches, of which stages count in proportion."""
        pairs = zip(counts, layers, strict=True)
        return sum(min(count, in_round) * part for count, part in pairs) / total

    if not rule.v_shaped:
        yield _waiting(layout, rank, layers), min(rank + 1, in_round) / layout.stages_per_rank
    elif rule.two_way:
        yield mean(2 * ranks - 1 - rank, rank + 1), mean(0, 1)
        yield mean(ranks - 1 - rank, rank + 1), mean(0, rank + 1)
    else:
        yield mean(2 * ranks - 1 - rank, rank + 1), mean(0, 1)
        yield mean(2 * ranks - rank, rank), mean(1, 0)
        yield mean(ranks, rank), mean(rank + 1, rank)
