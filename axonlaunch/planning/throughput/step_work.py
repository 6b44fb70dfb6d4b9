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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from torch import nn

from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig, with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.models.facts.scaled_sizes import ScaledSizes
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.models.source_of import source_of
from axonlaunch.planning.throughput.operations import (
    OperationTrace,
    Work,
    add,
    count_roundings,
)
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.extrapolation.extrapolate_chunks import few_chunks
from axonlaunch.planning.tracing.extrapolation.reduced_config import reduced_config
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
        gathered_bytes: Bytes of these parameters as ``fully_shard`` gathers them: in the compute
            type, except quantized ones.
        num_trained: Number of values of the rank's trained parameters.
    """

    work: Work
    gradient_bytes: float = 0.0
    parameter_bytes: float = 0.0
    gathered_bytes: float = 0.0
    num_trained: float = 0.0

    def plus(self, other: Share, *, times: float = 1.0) -> Share:
        """Return ``self + times * other``."""
        return Share(
            add(self.work, other.work, factor=times),
            self.gradient_bytes + times * other.gradient_bytes,
            self.parameter_bytes + times * other.parameter_bytes,
            self.gathered_bytes + times * other.gathered_bytes,
            self.num_trained + times * other.num_trained,
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

    @property
    def different_stages(self) -> list[int]:
        """Indices of stages such that every stage has the work and the layers of one of them."""
        last = len(self.layers) - 1
        places = {
            (index == 0, index == last, layers, self._leading_of(index)): index
            for index, layers in enumerate(self.layers)
        }
        return [*places.values()]

    def _leading_of(self, index: int) -> int:
        """Return the number of leading layers of a stage."""
        return min(self.layers[index], max(0, self.leading.count - sum(self.layers[:index])))

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
        if not (count := self._leading_of(index)):
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

    All blocks are traced if settings such as ``train.matmul_exclude`` treat some differently. With
    a pipeline, the first blocks stand for all also then.

    Args:
        config: Checked configuration.
        world_size: Number of ranks.

    Raises:
        ConfigError: The run cannot be traced.
    """
    [work] = step_works([config], world_size=world_size)
    if isinstance(work, ConfigError):
        raise work
    return work


def step_works(
    configs: Sequence[RunConfig], *, world_size: int, earlier: list[tuple[Any, Any]] | None = None
) -> list[StepWork | ConfigError]:
    """Count the operations of the steps of several runs, and trace runs with equal steps once.

    Args:
        configs: Checked configurations with the same number of ranks.
        world_size: Number of ranks.
        earlier: Traces of earlier calls, to which those of this call are added; None if there are
            none to keep.

    Returns:
        The work of each run, or the error if it cannot be traced.
    """
    plans = [_or_error(partial(_TracePlan.of, config, world_size)) for config in configs]
    earlier = [] if earlier is None else earlier
    functions: list[Any] = [function for function, _ in earlier]
    indices: list[list[int]] = []
    for plan in plans:
        needed = [] if isinstance(plan, ConfigError) else plan.functions()
        functions += [function for function in needed if function not in functions]
        indices.append([functions.index(function) for function in needed])
    missing = functions[len(earlier) :]
    traced = forked_map.map_forked(
        [partial(_or_error, function) for function in missing],
        task="tracing a step to predict its time",
        memory=fake_tensor_cache.recipes,
    )
    earlier += zip(missing, traced, strict=True)
    results = [result for _, result in earlier]
    works: list[StepWork | ConfigError] = []
    for plan, numbers in zip(plans, indices, strict=True):
        traces = [plan] if isinstance(plan, ConfigError) else [results[n] for n in numbers]
        errors = [trace for trace in traces if isinstance(trace, ConfigError)]
        works.append(errors[0] if errors else plan.work(traces))
    return works


def _or_error(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except ConfigError as error:
        return error


@dataclass(frozen=True)
class _Traces:
    """The traces of one rank, in one process, because later traces reuse its caches.

    Attributes:
        runs: For each depth, runs with increasing numbers of micro-batches, and the number of
            layers that are left out of their model, from its first one.
        stage: 0 for a rank of the first stage; 1 for a rank of the second half of the world.
    """

    runs: list[tuple[list[RunConfig], int]]
    stage: int

    def __call__(self) -> list[list[_TracedStep]]:
        return _trace(self.runs, stage=self.stage)


@dataclass(frozen=True)
class _Counts:
    """The number of layers of each stage of a pipeline, as configured or as balanced."""

    config: RunConfig

    def __call__(self) -> list[int]:
        return ReducedRun.of(self.config).counts


@dataclass(frozen=True)
class _TracePlan:
    """The traces that determine the work of a run.

    Attributes:
        config: Configuration of the run.
        world_size: Number of ranks.
        layout: Parallel layout of the run.
        sizes: Sizes of the model.
    """

    config: RunConfig
    world_size: int
    layout: Layout
    sizes: ScaledSizes

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> Self:
        """Choose the traces of a run.

        Raises:
            ConfigError: A pipeline's model cannot be built with fewer layers.
        """
        layout = Layout.of(config, world_size=world_size)
        in_pipeline = layout.pipeline > 1
        sizes = source_of(config).scaled_sizes() if in_pipeline else repeated_sizes(config)
        if not sizes.num_blocks and in_pipeline:
            message = (
                f"the blocks of {config.model.name} do not repeat, so it can't be extrapolated; "
                "use 1"
            )
            raise ConfigError([ConfigIssue("strategy.pipeline.degree", message, layout.pipeline)])
        return cls(config, world_size, layout, sizes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches."""
        return (2, 3) if self.layout.pipeline > 1 else (1, 2)[: min(2, self.layout.micro_batches)]

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of repeated layers of each stage; 0 for the whole model."""
        period = self.sizes.period
        return (period, 2 * period) if self.sizes.num_blocks else (0,)

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0, 1) if self.layout.pipeline > 1 else (0,)

    @property
    def jobs(self) -> list[tuple[int, int]]:
        """The number of repeated layers of each stage, and that of layers left out before them."""
        leading = self.sizes.leading
        jobs = [(depth, leading) for depth in self.depths]
        return [*jobs, (self.depths[0], 0)] if leading else jobs

    def functions(self) -> list[Any]:
        """Return the functions to call, each in its own process. Equal ones return the same."""
        reduce = partial(reduced_config, self.config, world_size=self.world_size)
        runs = [
            ([reduce(layers=depth, micro_batches=count) for count in self.counts], left_out)
            for depth, left_out in self.jobs
        ]
        traces: list[Any] = [_Traces(runs, rank) for rank in self.ranks]
        return [*traces, _Counts(self.config)] if self.layout.pipeline > 1 else traces

    def work(self, results: Sequence[Any]) -> StepWork:
        """Return the work of the run, given the results of ``functions``."""
        sizes, counts, depths, ranks = self.sizes, self.counts, self.depths, self.ranks
        depth, period, leading = sizes.num_blocks, sizes.period, sizes.leading
        stages = min(2, self.layout.stages_per_rank)
        traced = {
            (rank, d, m, left_out): trace
            for rank, traces_by_job in zip(ranks, results, strict=False)
            for (d, left_out), traces in zip(self.jobs, traces_by_job, strict=True)
            for m, trace in zip(counts, traces, strict=True)
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
            tuple(results[-1]) if self.layout.pipeline > 1 else (depth,),
            at_full_depth(lambda trace: trace.parameters),
            smallest.sample_length,
            sizes.hidden_size,
            at_full_depth(lambda trace: trace.flops_per_token),
            leading_layers,
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


def _trace(runs: list[tuple[list[RunConfig], int]], *, stage: int) -> list[list[_TracedStep]]:
    """Trace one step of several runs on one rank. Call this in a process forked for it.

    The arguments are the fields of ``_Traces``.
    """
    _fuse_rms_norm()
    [config, *_], _ = runs[0]
    ranks = num_ranks(config)
    world = fake_world.join_fake_world(
        rank=stage * ranks // 2,
        world_size=ranks,
        expert_load=config.estimate.imbalance,
    )
    with refusing_untraceable(config):
        return [_trace_depth(configs, world, left_out) for configs, left_out in runs]


def _trace_depth(configs: list[RunConfig], world: World, left_out: int) -> list[_TracedStep]:
    """Trace one step of each run, with one engine for all of them if their steps allow it.

    The engine is that of the run with most micro-batches, also for fewer of them. The work of a
    router's loss is linear in them only then: an engine of one micro-batch computes the router's
    choices once, and others compute them once more before the first micro-batch.

    A pipeline has a schedule for its micro-batches, so each run has its own engine. With ZeRO-1,
    the second step of an engine copies small parameters, and later ones do not. All other updates
    are equal, so one is traced.
    """
    layouts = [Layout.of(config, world_size=world.world_size) for config in configs]
    in_pipeline = layouts[0].pipeline > 1
    updates_differ = layouts[0].facts.divides_update
    traced: list[_TracedStep] = []
    engine: _Steps | None = None
    for config, layout in zip(configs, layouts, strict=True):
        update = _update_of(traced[0]) if traced and not updates_differ else None
        if engine is None or in_pipeline or updates_differ:
            owner = config if in_pipeline else configs[-1]
            engine = _Steps.of(owner, world, left_out, updates=update is None)
        traced.append(engine.trace(layout.micro_batches, update=update))
    return traced


def _update_of(step: _TracedStep) -> Work:
    return {key: amount for key, amount in step.share.work.items() if key.phase == "update"}


@dataclass(frozen=True)
class _Steps:
    """An engine whose steps are traced.

    Attributes:
        reduced: Run of the engine.
        rank: Rank of the engine.
    """

    reduced: ReducedRun
    rank: FakeRank

    @classmethod
    def of(cls, config: RunConfig, world: World, left_out: int, *, updates: bool = True) -> Self:
        """Build the engine of a run without the first ``left_out`` layers.

        Args:
            config: Configuration of the run.
            world: Fake world of the rank.
            left_out: Number of layers.
            updates: Whether updates will be traced, so that optimizer states must exist.
        """
        # How a compiler fuses kernels is not traced; ``step_time`` applies a factor for it.
        config = with_values(config, {"train.compile": False})
        reduced = ReducedRun.of(config).without_first(left_out)
        rank = FakeRank(reduced, world)
        with rank.storing():
            # Ranks that share sequences keep the positions that their first step computes.
            rank.prepare_buffers(runs_step=reduced.layout.divides_sequences)
            if updates:
                rank.create_states()
        return cls(reduced, rank)

    def trace(self, micro_batches: int, *, update: Work | None = None) -> _TracedStep:
        """Trace a step.

        Args:
            micro_batches: Number of its micro-batches.
            update: Work of the update if it is known; it does not run then.
        """
        reduced, engine = self.reduced, self.rank.engine
        trace = OperationTrace(reduced.layout.axes, reduced.layout.expert_axes)
        batch = self.rank.batch(micro_batches)
        with (
            self.rank.storing(few_chunks(trace.repeat)),
            count_roundings(trace),
            trace,
            fake_world.watch_host_waits(trace.count_host_wait),
        ):
            engine.backward(batch)
            if update is None:
                with trace.updating(), fake_world.assume_true():
                    engine.update()
        named = dict(engine.named_parameters())
        parameters = [local_part(p.detach()) for p in named.values()]
        trained = [local_part(p.detach()) for p in named.values() if p.requires_grad]
        length = reduced.sample.shape[0] if reduced.sample.ndim == 1 else 1
        compute = precision_of(reduced.config).compute.nbytes
        share = Share(
            add(trace.work, update or {}),
            gradient_bytes=sum(p.nbytes for p in trained),
            parameter_bytes=sum(p.nbytes for p in parameters),
            gathered_bytes=sum(
                p.numel() * compute if p.is_floating_point() else p.nbytes for p in parameters
            ),
            num_trained=sum(p.numel() for p in trained),
        )
        return _TracedStep(share, engine.num_parameters, engine.flops.per_token(length), length)


def _fuse_rms_norm() -> None:
    """Patch RMSNorm to count as one kernel, as on a GPU. On a CPU torch runs seven kernels.

    LayerNorm replaces it, because it reads and writes the same amount.
    """

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        return nn.functional.layer_norm(x, shape, weight, None, eps or 1e-6)

    nn.functional.rms_norm = rms_norm  # type: ignore[assignment]
