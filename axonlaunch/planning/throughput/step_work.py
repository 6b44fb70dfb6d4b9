"""Counts the operations of one step for each pipeline stage, from traces of a few layers.

The number of operations is linear in the number of layers and in the number of micro-batches.
Traces with two depths and two numbers of micro-batches determine it. Leading layers of another
kind, such as dense ones before mixtures of experts, are left out of these traces and counted by a
further one. A pipeline over a model that cannot be built with fewer blocks is an error.

An example, in FLOPs, from traces of 1 and 2 layers with 1 and 2 micro-batches:

    1 layer, 1 micro-batch   115        1 layer, 2 micro-batches   216
    2 layers, 1 micro-batch  139        2 layers, 2 micro-batches  260

One more layer adds 24, or 44 with two micro-batches: 20 per micro-batch and 4 per step. The rest of
the model has the remaining 91 and 172: 81 per micro-batch and 10 per step. So 32 layers and 8
micro-batches need 10 + 32 * 4 + 8 * (81 + 32 * 20) = 5906.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks, settings_for_ranks
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.models.specs.source_of import source_of
from axonlaunch.planning.throughput.operations import OperationTrace, Work, add
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun, repeated_sizes
from axonlaunch.planning.tracing.untraceable import refusing_untraceable
from axonlaunch.system.processes import forked_map

SAMPLES = 11
"""Number of samples of the step on one device from which layouts are estimated.

It is more than one, because BatchNorm needs several samples. It is a prime that divides no width,
so that sizes which depend on the number of samples can be recognized.
"""


@dataclass(frozen=True)
class Share:
    """Work of a part of a step, with the bytes of its parameters and gradients.

    Attributes:
        work: Amount of each operation.
        gradient_bytes: Bytes of the rank's trained parameters.
        parameter_bytes: Bytes of the rank's parameters.
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
class LeadingLayers:
    """Work of the layers before the repeated ones.

    Attributes:
        count: Number of the layers.
        step: Work per step and layer, as the mean of all leading layers.
        micro: Work per micro-batch and layer, likewise.
    """

    count: int = 0
    step: Share = field(default_factory=lambda: Share({}))
    micro: Share = field(default_factory=lambda: Share({}))


@dataclass(frozen=True)
class StageWork:
    """Work of a pipeline stage; ``ends`` are the parts of the model outside its layers.

    Attributes:
        step_ends: Work per step outside the layers.
        step_layer: Work per step and layer.
        micro_ends: Work per micro-batch outside the layers.
        micro_layer: Work per micro-batch and layer.
    """

    step_ends: Share
    step_layer: Share
    micro_ends: Share
    micro_layer: Share


@dataclass(frozen=True)
class StepWork:
    """Work of one step of a full run.

    Attributes:
        first: Work of the first stage, which is also the only one without a pipeline. Its layer is
            a repeated one.
        last: Work of the last stage, which computes the loss.
        layers: Number of layers of each stage, in order, with the leading ones.
        parameters: Number of parameters of the full model.
        sample_length: Positions of a sample; 1 if samples are not sequences.
        hidden_size: Features per position between layers; 0 if unknown.
        flops_per_token: FLOPs of a training step per token, see ``models.facts.flops``.
    """

    first: StageWork
    last: StageWork
    layers: tuple[int, ...]
    parameters: int
    sample_length: int
    hidden_size: int
    flops_per_token: int
    leading: LeadingLayers = LeadingLayers()

    @property
    def num_repeated(self) -> int:
        """Number of layers of the model without the leading ones."""
        return sum(self.layers) - self.leading.count

    def stage(self, index: int) -> StageWork:
        """Return the work of a stage, whose layer is the mean of the leading and repeated layers.

        Only the first and the last stage have ends.
        """
        work, empty = self.last, Share({})
        if index == 0:
            work = self.first
        elif index < len(self.layers) - 1:
            work = StageWork(empty, work.step_layer, empty, work.micro_layer)
        layers, leading = self.layers[index], self.leading
        count = min(layers, max(0, leading.count - sum(self.layers[:index])))
        if not count:
            return work
        step_layer, micro_layer = (
            empty.plus(repeated, times=1 - count / layers).plus(other, times=count / layers)
            for repeated, other in (
                (work.step_layer, leading.step),
                (work.micro_layer, leading.micro),
            )
        )
        return replace(work, step_layer=step_layer, micro_layer=micro_layer)


@dataclass(frozen=True)
class _TracedStep:
    """Result of tracing one step; the fields have the same meaning as in ``StepWork``."""

    share: Share
    parameters: int
    flops_per_token: int
    sample_length: int


def step_work(config: RunConfig, *, world_size: int) -> StepWork:
    """Count the operations of a step, from the fewest and smallest traces that determine them.

    Args:
        config: Checked configuration.
        world_size: Number of ranks.

    Raises:
        ConfigError: The run cannot be traced.
    """
    layout = Layout.of(config, world_size=world_size)
    sizes = repeated_sizes(config)
    depth, period, leading = sizes.num_blocks, sizes.period, sizes.leading
    if not depth and layout.pipeline > 1:
        message = (
            f"the blocks of {config.model.name}, or settings of them such as train.matmul_exclude, "
            "do not repeat, so it can't be extrapolated; use 1"
        )
        raise ConfigError([ConfigIssue("strategy.pipeline.degree", message, layout.pipeline)])
    counts = (2, 3) if layout.pipeline > 1 else (1, 2)[: min(2, layout.micro_batches)]
    depths = (period, 2 * period) if depth else (0,)
    stages = min(2, layout.stages_per_rank)
    ranks = (0, 1) if layout.pipeline > 1 else (0,)
    configs = {
        (d, m): reduced_config(config, world_size=world_size, layers=d, micro_batches=m)
        for d in depths
        for m in counts
    }
    # One process per rank or per depth, because later traces in a process reuse its caches.
    batches = [list(configs)] if layout.pipeline > 1 else [[(d, m) for m in counts] for d in depths]
    jobs = [(rank, keys, leading) for rank in ranks for keys in batches]
    if leading:
        jobs.append((ranks[0], [(depths[0], m) for m in counts], 0))
    functions: list[Any] = [
        partial(_trace, [configs[key] for key in keys], stage=rank, left_out=left_out)
        for rank, keys, left_out in jobs
    ]
    if layout.pipeline > 1:
        functions.append(lambda: ReducedRun.of(config).counts)  # as configured or as balanced
    results = forked_map.map_forked(
        functions, task="tracing a step to predict its time", memory=fake_tensor_cache.recipes
    )
    layers = tuple(results[-1]) if layout.pipeline > 1 else (depth,)
    traced = {
        (rank, *key, left_out): trace
        for (rank, keys, left_out), traces in zip(jobs, results, strict=False)
        for key, trace in zip(keys, traces, strict=True)
    }
    first, last = (
        _fit(
            {(d, m): traced[rank, d, m, leading].share for d in depths for m in counts},
            stages=stages,
        )
        for rank in (ranks[0], ranks[-1])
    )
    smallest = traced[ranks[0], depths[0], counts[0], 0]
    leading_layers = LeadingLayers()
    if leading:
        mean = {
            m: Share({})
            .plus(traced[ranks[0], depths[0], m, 0].share, times=1 / leading)
            .plus(traced[ranks[0], depths[0], m, leading].share, times=-1 / leading)
            for m in counts
        }
        leading_layers = LeadingLayers(leading, *_separate_micro_batches(mean))

    def at_full_depth(counted: Callable[[_TracedStep], int]) -> int:
        if not depth:
            return counted(smallest)
        shallow, deeper = (counted(traced[ranks[0], d, counts[0], leading]) for d in depths)
        missing = depth - leading - period * stages * len(ranks)
        per_period = (deeper - shallow) // (stages * len(ranks))
        return counted(smallest) + per_period * missing // period

    return StepWork(
        first,
        last,
        layers,
        at_full_depth(lambda trace: trace.parameters),
        smallest.sample_length,
        sizes.hidden_size,
        at_full_depth(lambda trace: trace.flops_per_token),
        leading_layers,
    )


def reduced_config(
    config: RunConfig, *, world_size: int, layers: int, micro_batches: int
) -> RunConfig:
    """Return a run with fewer layers, fewer micro-batches and a shorter pipeline.

    All other axes are unchanged, and the world size is adapted.

    Args:
        config: Configuration of the full run.
        world_size: Number of ranks of the full run.
        layers: Number of repeated layers of each stage; 0 keeps all layers. The first stage has the
            leading layers too.
        micro_batches: Number of micro-batches of a rank's step.
    """
    layout = Layout.of(config, world_size=world_size)
    settings: dict[str, Any] = {
        "train.micro_batch_size": layout.micro_batch_size,
        "train.global_batch_size": layout.micro_batch_size * micro_batches * layout.data_ranks,
        "train.compile": False,
        "train.optimizer_in_backward": False,  # the same work in another order
    }
    stages, leading = 1, source_of(config).scaled_sizes().leading if layers else 0
    if layout.pipeline > 1:
        per_rank = min(2, layout.stages_per_rank)
        stages = 2 * per_rank
        settings |= {
            "strategy.pipeline.degree": 2,
            "strategy.pipeline.schedule": _short_schedule(
                layout.schedule, stages_per_rank=per_rank
            ),
            "strategy.pipeline.stages_per_rank": per_rank,
            "strategy.pipeline.split": [leading + layers, *[layers] * (stages - 1)],
            "strategy.pipeline.microbatches": "auto",
        }
        world_size = 2 * world_size // layout.pipeline
    if layers:
        settings |= source_of(config).with_blocks(leading + layers * stages)
    return with_values(config, {**settings, **settings_for_ranks(world_size)})


def _short_schedule(schedule: str, *, stages_per_rank: int) -> Any:
    """Return a schedule for two ranks that does the same work, possibly in another order."""
    if stages_per_rank == 1 and not SCHEDULES[schedule].separate_weight_grad:
        return "gpipe"
    return (
        "interleaved_zero_bubble"
        if SCHEDULES[schedule].separate_weight_grad
        else "interleaved_1f1b"
    )


def _fit(shares: dict[tuple[int, int], Share], *, stages: int) -> StageWork:
    """Compute the four parts of a stage's work, which is linear in layers and micro-batches.

    In the example of the module, with one stage: 24 and 44 of the layer, and 91 and 172 outside the
    layers, are each separated into work per step and work per micro-batch.

    Args:
        shares: Traced work by (layers of a stage, micro-batches).
        stages: Number of stages of the traced rank.
    """
    counts = sorted({m for _, m in shares})
    depths = sorted({d for d, _ in shares})
    empty = Share({})
    layer, ends = {}, {}
    for m in counts:
        layer[m] = empty
        if len(depths) > 1:
            difference = shares[depths[1], m].plus(shares[depths[0], m], times=-1)
            layers_between = stages * (depths[1] - depths[0])
            layer[m] = empty.plus(difference, times=1 / layers_between)
        ends[m] = shares[depths[0], m].plus(layer[m], times=-depths[0] * stages)
    step_ends, micro_ends = _separate_micro_batches(ends)
    step_layer, micro_layer = _separate_micro_batches(layer)
    return StageWork(step_ends, step_layer, micro_ends, micro_layer)


def _separate_micro_batches(shares: dict[int, Share]) -> tuple[Share, Share]:
    """Separate the work per step from the work per micro-batch.

    If only one number of micro-batches was traced, the update is the work per step.
    """
    if len(shares) == 1:
        (share,) = shares.values()
        update = {key: amount for key, amount in share.work.items() if key.phase == "update"}
        rest = {key: amount for key, amount in share.work.items() if key.phase != "update"}
        return replace(share, work=update), Share(rest)
    fewer, more = sorted(shares)  # one apart
    per_micro_batch = shares[more].plus(shares[fewer], times=-1)
    return shares[fewer].plus(per_micro_batch, times=-fewer), per_micro_batch


def _trace(configs: list[RunConfig], *, stage: int, left_out: int = 0) -> list[_TracedStep]:
    """Trace one step of several runs on one rank. Call this in a process forked for it.

    Args:
        configs: Configurations of the runs.
        stage: 0 for a rank of the first stage; 1 for a rank of the second half of the world.
        left_out: Number of layers that are left out of the model, from its first one.
    """
    _fuse_rms_norm()
    ranks = num_ranks(configs[0])
    world = fake_world.join_fake_world(
        rank=stage * ranks // 2,
        world_size=ranks,
        expert_load=configs[0].estimate.imbalance,
    )
    with refusing_untraceable(configs[0]):
        return [_trace_one(config, world, left_out) for config in configs]


def _trace_one(config: RunConfig, world: World, left_out: int) -> _TracedStep:
    # How a compiler fuses kernels is not traced; ``step_time`` applies a factor for it.
    reduced = ReducedRun.of(with_values(config, {"train.compile": False})).without_first(left_out)
    dry = FakeRank(reduced, world)
    trace = OperationTrace(reduced.layout.axes, reduced.layout.expert_axes)
    batch = dry.batch()
    with dry.storing():
        dry.settle()
        with trace, fake_world.watch_host_waits(trace.count_host_wait):
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
    return _TracedStep(share, engine.num_parameters, engine.flops.per_token(length), length)


def _fuse_rms_norm() -> None:
    """Patch RMSNorm to count as one kernel, as on a GPU. On a CPU torch runs seven kernels.

    LayerNorm replaces it, because it reads and writes the same amount.
    """

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        return nn.functional.layer_norm(x, shape, weight, None, eps or 1e-6)

    nn.functional.rms_norm = rms_norm  # type: ignore[assignment]
