"""What one step does on the ranks of each pipeline stage, from traces of a few layers.

Layers repeat and micro-batches repeat, so operations are counted at two depths and two numbers of
micro-batches and follow a line in both. A pipeline over a model that can't have fewer blocks is
refused.

An example, in floating-point operations: traces of 1 and 2 layers with 1 and 2 micro-batches count

    1 layer, 1 micro-batch   115        1 layer, 2 micro-batches   216
    2 layers, 1 micro-batch  139        2 layers, 2 micro-batches  260

One more layer adds 24, or 44 with two micro-batches: 20 for each micro-batch, 4 for each step. What
is left, 91 and 172, is beside the layers: 81 for each micro-batch, 10 for each step. So 32 layers
and 8 micro-batches take 10 + 32 * 4 + 8 * (81 + 32 * 20) = 5906.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from axonlaunch.comm import World
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.layout import Layout, num_ranks, of_ranks
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.engines.optimizer.clipping import local_part
from axonlaunch.models import fake_tensor_cache
from axonlaunch.models.figures import model_figures, of_blocks
from axonlaunch.planning.throughput.operations import OperationTrace, Work, add
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.reduced_run import ReducedRun
from axonlaunch.planning.tracing.untraceable import refusing_untraceable
from axonlaunch.system import forked_map

SAMPLES = 11
"""Samples of a step on one device, from which layouts are estimated: several, for a BatchNorm can't
take one, and a prime that divides no width, so that sizes which grow with samples stand out."""


@dataclass(frozen=True)
class Share:
    """Work that comes with something, and the bytes of parameters and gradients that do.

    Attributes:
        work: Operations.
        gradient_bytes: Of the parameters held that are trained.
        parameter_bytes: Of those held.
    """

    work: Work
    gradient_bytes: float = 0.0
    parameter_bytes: float = 0.0

    def plus(self, other: Share, *, times: float = 1.0) -> Share:
        """Return ``self + times * other``."""
        return Share(
            add(self.work, other.work, factor=times),
            self.gradient_bytes + times * other.gradient_bytes,
            self.parameter_bytes + times * other.parameter_bytes,
        )


@dataclass(frozen=True)
class StageWork:
    """What a stage of some layers does; ``ends`` is what it holds beside them.

    Attributes:
        step_ends: Once a step.
        step_layer: Once a step for each layer.
        micro_ends: For each micro-batch.
        micro_layer: For each micro-batch and layer.
    """

    step_ends: Share
    step_layer: Share
    micro_ends: Share
    micro_layer: Share


@dataclass(frozen=True)
class StepWork:
    """A step of a whole run.

    Attributes:
        first: Of the stage that is fed samples, and of the only one.
        last: Of the stage that computes the loss.
        layers: Layers of each stage, in order.
        parameters: Of the whole model.
        sample_length: Positions of a sample; 1 where it is no sequence.
        hidden_size: Numbers of a position between layers; 0 where that is not known.
        flops_per_token: FLOPs that the whole model needs for a token, as ``models.flops`` counts
            them.
    """

    first: StageWork
    last: StageWork
    layers: tuple[int, ...]
    parameters: int
    sample_length: int
    hidden_size: int
    flops_per_token: int


@dataclass(frozen=True)
class _Traced:
    """One trace: a step's operations and bytes, parameters, FLOPs per token, sample length."""

    share: Share
    parameters: int
    flops_per_token: int
    sample_length: int


def step_work(config: RunConfig, *, world_size: int) -> StepWork:
    """Count what a step does, from as few and as small traces as determine it.

    Args:
        config: Checked.
        world_size: Ranks.

    Raises:
        ConfigError: The run can't be traced.
    """
    layout = Layout.of(config, world_size=world_size)
    figures = model_figures(config.model)
    depth, period = figures.num_blocks, figures.period
    if not depth and layout.pipeline > 1:
        message = f"fewer blocks can't stand for all of those of {config.model.name}; use 1"
        raise ConfigError([ConfigIssue("strategy.pipeline.degree", message, layout.pipeline)])
    counts = (2, 3) if layout.pipeline > 1 else (1, 2)[: min(2, layout.micro_batches)]
    depths = (period, 2 * period) if depth else (0,)
    stages = min(2, layout.stages_per_rank)
    ranks = (0, 1) if layout.pipeline > 1 else (0,)
    runs = {
        (d, m): reduced_config(config, world_size=world_size, layers=d, micro_batches=m)
        for d in depths
        for m in counts
    }
    # A process for each rank, or each depth: what a first trace learns makes the next ones quick.
    batches = [list(runs)] if layout.pipeline > 1 else [[(d, m) for m in counts] for d in depths]
    jobs = [(rank, keys) for rank in ranks for keys in batches]
    functions: list[Any] = [
        partial(_trace, [runs[key] for key in keys], stage=rank) for rank, keys in jobs
    ]
    if layout.pipeline > 1:
        functions.append(partial(_split, config))
    results = forked_map.map_forked(functions, memory=fake_tensor_cache.recipes)
    layers = tuple(results[-1]) if layout.pipeline > 1 else (depth,)
    traced = {
        (rank, *key): trace
        for (rank, keys), traces in zip(jobs, results, strict=False)
        for key, trace in zip(keys, traces, strict=True)
    }
    first, last = (
        _fit({(d, m): traced[rank, d, m].share for d in depths for m in counts}, stages=stages)
        for rank in (ranks[0], ranks[-1])
    )

    def at_full_depth(counted: Callable[[_Traced], int]) -> int:
        at_depths = [counted(traced[ranks[0], d, counts[0]]) for d in depths]
        if not depth:
            return at_depths[0]
        of_a_period = (at_depths[1] - at_depths[0]) // (stages * len(ranks))
        return at_depths[0] + of_a_period * (depth - period * stages * len(ranks)) // period

    return StepWork(
        first,
        last,
        layers,
        at_full_depth(lambda trace: trace.parameters),
        traced[ranks[0], depths[0], counts[0]].sample_length,
        figures.hidden_size,
        at_full_depth(lambda trace: trace.flops_per_token),
    )


def reduced_config(
    config: RunConfig, *, world_size: int, layers: int, micro_batches: int
) -> RunConfig:
    """Return a run like this one in every axis but a shorter pipeline, in a world to fit.

    Args:
        config: The whole run.
        world_size: Its ranks.
        layers: Of each stage; 0: as many as there are.
        micro_batches: Of a rank's step.
    """
    layout = Layout.of(config, world_size=world_size)
    settings: dict[str, Any] = {
        "train.micro_batch_size": layout.micro_batch_size,
        "train.global_batch_size": layout.micro_batch_size * micro_batches * layout.data_ranks,
        "train.compile": False,
    }
    stages = 1
    if layout.pipeline > 1:
        per_rank = min(2, layout.stages_per_rank)
        stages = 2 * per_rank
        settings |= {
            "strategy.pipeline.degree": 2,
            "strategy.pipeline.schedule": _short_schedule(
                layout.schedule, stages_per_rank=per_rank
            ),
            "strategy.pipeline.stages_per_rank": per_rank,
            "strategy.pipeline.split": [layers] * stages,
            "strategy.pipeline.microbatches": "auto",
        }
        world_size = 2 * world_size // layout.pipeline
    if layers:
        settings |= of_blocks(config.model, layers * stages)
    return with_values(config, {**settings, **of_ranks(world_size)})


def _short_schedule(schedule: str, *, stages_per_rank: int) -> Any:
    """Return a schedule that does the same work in two ranks, in whatever order."""
    if stages_per_rank == 1 and not SCHEDULES[schedule].separate_weight_grad:
        return "gpipe"
    return (
        "interleaved_zero_bubble"
        if SCHEDULES[schedule].separate_weight_grad
        else "interleaved_1f1b"
    )


def _fit(at: dict[tuple[int, int], Share], *, stages: int) -> StageWork:
    """Find the four parts of a stage's work, which is linear in layers and in micro-batches.

    The module's example, where ``stages`` is 1: the layer's 24 and 44, and the ends' 91 and 172,
    are each divided into what comes once a step and what comes with every micro-batch.

    Args:
        at: By layers of a stage and micro-batches.
        stages: Stages of the traced rank.
    """
    counts = sorted({m for _, m in at})
    depths = sorted({d for d, _ in at})
    nothing = Share({})
    layer, ends = {}, {}
    for m in counts:
        layer[m] = nothing
        if len(depths) > 1:
            difference = at[depths[1], m].plus(at[depths[0], m], times=-1)
            between = stages * (depths[1] - depths[0])
            layer[m] = nothing.plus(difference, times=1 / between)
        ends[m] = at[depths[0], m].plus(layer[m], times=-depths[0] * stages)
    step_ends, micro_ends = _by_micro_batches(ends)
    step_layer, micro_layer = _by_micro_batches(layer)
    return StageWork(step_ends, step_layer, micro_ends, micro_layer)


def _by_micro_batches(at: dict[int, Share]) -> tuple[Share, Share]:
    """Separate what comes once a step from what each micro-batch brings.

    With one micro-batch alone, the update is what comes once.
    """
    if len(at) == 1:
        (share,) = at.values()
        update = {key: amount for key, amount in share.work.items() if key.phase == "update"}
        rest = {key: amount for key, amount in share.work.items() if key.phase != "update"}
        return replace(share, work=update), Share(rest)
    fewer, more = sorted(at)  # one apart
    each = at[more].plus(at[fewer], times=-1)
    return at[fewer].plus(each, times=-fewer), each


def _trace(configs: list[RunConfig], *, stage: int) -> list[_Traced]:
    """Trace a step of one rank of several runs, in a process of its own."""
    _norm_in_one_kernel()
    ranks = num_ranks(configs[0])
    world = fake_world.join_fake_world(rank=stage * ranks // 2, world_size=ranks)
    with refusing_untraceable(configs[0]):
        return [_trace_one(config, world) for config in configs]


def _trace_one(config: RunConfig, world: World) -> _Traced:
    # What fusing saves is the roofline's: how a compiler cuts a graph into kernels is not traced.
    reduced = ReducedRun.of(with_values(config, {"train.compile": False}))
    dry = FakeRank(reduced, world)
    trace = OperationTrace(reduced.layout.axes)
    batch = dry.batch()
    with dry.storing():
        dry.settle()
        with trace:
            dry.engine.backward(batch)
            with trace.updating(), fake_world.assume_true():
                dry.engine.update()
    parameters = dict(dry.engine.named_parameters()).values()
    sizes = [(local_part(p.detach()).nbytes, p.requires_grad) for p in parameters]
    sample = reduced.sample
    length = sample.shape[0] if sample.ndim == 1 else 1
    engine = dry.engine
    share = Share(
        trace.work,
        gradient_bytes=sum(size for size, is_trained in sizes if is_trained),
        parameter_bytes=sum(size for size, _ in sizes),
    )
    return _Traced(share, engine.num_parameters, engine.flops.per_token(length), length)


def _split(config: RunConfig) -> list[int]:
    """Return the layers of each stage: as given, or as the engine balances them."""
    return ReducedRun.of(config).counts


def _norm_in_one_kernel() -> None:
    """Count RMSNorm as one kernel, as on a GPU; on a CPU torch runs seven.

    LayerNorm stands in for it: it reads and writes the same.
    """

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        return nn.functional.layer_norm(x, shape, weight, None, eps or 1e-6)

    nn.functional.rms_norm = rms_norm  # type: ignore[assignment]
