"""Estimates a rank's memory by formulas, from the traced activations of one sample on one device.

The planner uses this to discard layouts; the remaining ones are traced. The states come from
``analytic_states``. Activations are divided as in Korthikanti et al., 2022, section 4. Rounding is
not included.

Compared with full estimates of 64 runs of a Llama and a GPT of 0.25 B parameters (ddp, zero1, fsdp,
offload, tensor and pipeline parallelism and mixes of them, with and without recomputation), tensors
are 0.7% off on average and 6.9% at most, and the process 1.3% and 9.1%. For 18 runs of a mixture of
experts it is 1.9% and 7.7%, and for the process 1.3% and 3.4%.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.consistency.layout import (
    Layout,
    estimate_device,
    num_ranks,
    settings_for_ranks,
)
from axonlaunch.config.optimization.optimizer import AdamWConfig
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.engines.optimizer.copy_streams import left_before
from axonlaunch.engines.optimizer.optimizers import chosen_options, names_in_groups
from axonlaunch.engines.tensor.plan_checks import ROW_STYLES, style_modules
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.parameter_facts import TrainingShares, parameter_facts
from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.models.source_of import source_of
from axonlaunch.planning.memory import analytic_states, cuda_process, layer_activations
from axonlaunch.planning.memory.layer_activations import ActivationBytes
from axonlaunch.planning.memory.pipeline_ranks import PipelineRank, stage_layers
from axonlaunch.planning.throughput.analytic_work import ExpertShare
from axonlaunch.planning.throughput.operations import Amount, AttentionOp, Operation, Product
from axonlaunch.planning.throughput.step_work import SAMPLES, StepWork, step_work
from axonlaunch.planning.tracing.extrapolation.reduced_config import reduced_config
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.stage_trace import trace_rank
from axonlaunch.planning.tracing.storage_trace import CATEGORIES, Category
from axonlaunch.preflight.parallelism import expert_degrees
from axonlaunch.system.processes import forked_map

_TRANSIENT: tuple[Category, ...] = ("activations", "temporary")
_BESIDE_COMPUTE: tuple[Category, ...] = ("communication", "gradients")
"""Categories in the streams of ``fully_shard``."""
_MODES = ("none", "selective", "full")
_LIGHT_LOAD = 0.5
"""Load of experts that a second trace has, to find what grows with it; any model allows it."""
_UNUSED = 0.02
"""Least unused part of the reserved memory, relative to the tensors; low, so that no fitting layout
is lost."""
_UNUSED_LOGITS = 0.5
"""Unused part of the reserved memory, relative to logits in fp32, which fit into no smaller gap.

For Llama and GPT with ddp and zero1 it is 0.5 to 0.8.
"""
_FP32 = 4
"""Bytes of a logit in fp32."""


@dataclass(frozen=True)
class Formulas:
    """A model traced on one device, from which all of its layouts are estimated.

    Attributes:
        single_device: Work of a step with ``SAMPLES`` samples.
        activations: Activations of one sample for each kind of recomputation.
        shares: Sizes of gradients and optimizer states relative to the parameters.
        has_router_loss: Whether routers have a loss of the global batch, see ``RouterLoss``.
        streamed: Most trained parameters that an update streamed from host memory has on the
            device at a time, relative to all of them.
    """

    single_device: StepWork
    activations: dict[str, ActivationBytes]
    shares: TrainingShares = field(default_factory=TrainingShares)
    has_router_loss: bool = False
    streamed: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Trace the model of a run.

        Raises:
            ConfigError: The model cannot be traced.
        """
        return cls.of_each([config])[0]

    @classmethod
    def of_each(cls, configs: Sequence[RunConfig]) -> list[Self]:
        """Trace the models of several runs.

        Raises:
            ConfigError: A model cannot be traced.
        """
        alone = [on_one_device(config) for config in configs]
        # Activations do not depend on the optimizer.
        models = [with_values(config, {"optimizer": AdamWConfig()}) for config in alone]
        distinct = [model for n, model in enumerate(models) if model not in models[:n]]
        runs: list[Callable[[], Any]] = [
            *(partial(step_work, config, world_size=1) for config in alone),
            *(partial(activations, model) for model in distinct),
        ]
        traced = forked_map.map_forked(
            runs, task="tracing a step on one device", memory=fake_tensor_cache.recipes
        )
        by_mode = traced[len(alone) :]
        return [
            cls(
                work,
                by_mode[distinct.index(model)],
                TrainingShares.of(config),
                has_router_loss=spec_for(config).mixes_samples == "batch",
                streamed=_streamed_share(config),
            )
            for config, model, work in zip(configs, models, traced[: len(alone)], strict=True)
        ]

    @functools.cached_property
    def head_layers(self) -> float:
        """FLOPs of a forward outside of the layers, relative to those of a layer.

        They are counted as for the default split of a pipeline: causal attention is not halved.
        """
        first = self.single_device.first
        ends, layer = (
            sum(_forward_flops(key, amount) for key, amount in share.work.items())
            for share in (first.micro_ends, first.micro_layer)
        )
        return ends / layer if layer else 0.0

    def stage_layers(self, layout: Layout) -> tuple[int, ...]:
        """Return the number of layers of each pipeline stage of a layout."""
        return stage_layers(sum(self.single_device.layers), layout.num_stages, self.head_layers)

    def ranks(self, layout: Layout) -> list[PipelineRank]:
        """Return the first two ranks of a pipeline and the last one, as an estimate does.

        If the layers are unknown, one rank stands for all.
        """
        leading = self.single_device.leading.count
        depth = sum(self.single_device.layers)
        if layout.pipeline == 1:
            return [PipelineRank(depth, leading)]
        layers = self.stage_layers(layout)
        ranks = [
            PipelineRank.of(layout, rank, layers=layers, leading=leading)
            for rank in sorted({0, 1, layout.pipeline - 1})
        ]
        return ranks if depth else [replace(ranks[0], has_first=True, has_last=True)]

    def experts(self, config: RunConfig, layout: Layout) -> ExpertShare:
        """Return the tokens and parameters of a rank's experts, for step times."""
        return ExpertShare(
            load=_expert_load(config.estimate.imbalance, layout, self.shares),
            parameters=_expert_parameters(self.single_device, self.shares),
            has_router_loss=self.has_router_loss,
        )

    def tensor_bytes(self, config: RunConfig, layout: Layout, *, by_stream: bool = False) -> float:
        """Return the approximate bytes of tensors on the rank with the highest peak.

        Args:
            config: Configuration of the run, with ``launch.nproc`` resolved.
            layout: Parallel layout of the run.
            by_stream: See ``peak_bytes``.
        """
        return max(
            peak_bytes(
                config,
                layout,
                rank,
                work=self.single_device,
                activations=self.activations,
                shares=self.shares,
                by_stream=by_stream,
            )
            for rank in self.ranks(layout)
        )

    def process_bytes(self, config: RunConfig, layout: Layout | None = None) -> float:
        """Return the approximate device memory of the rank with the highest peak.

        Args:
            config: Configuration of the run, with ``launch.nproc`` resolved.
            layout: Parallel layout of the run; None computes it.
        """
        layout = layout or Layout.of(config, world_size=num_ranks(config))
        on_gpu = estimate_device(config) == "gpu"
        tensors = self.tensor_bytes(
            config, layout, by_stream=on_gpu and layout.facts.shards_parameters
        )
        if not on_gpu:
            return tensors
        other_bytes = cuda_process.non_allocator_bytes(
            cuda_process.communicators_of(config, layout), config.hardware
        )
        tensors += self.streamed * analytic_states.streamed_bytes(
            config, layout, total=_total_bytes(self.single_device), shares=self.shares
        )
        logits = _FP32 * _rank_logits(config, layout, self.single_device) / layout.tensor
        unused = max(_UNUSED * tensors, _UNUSED_LOGITS * logits)
        return tensors + unused + sum(cuda_process.cublas_workspaces(config)) + other_bytes


def _streamed_share(config: RunConfig) -> float:
    """Return ``Formulas.streamed`` of a run."""
    facts = parameter_facts(spec_for(config), on_meta(config, seed=config.seed))
    by_optimizer = names_in_groups(chosen_options(config.optimizer, facts))
    shapes = [facts[name].shape for groups in by_optimizer for group in groups for name in group]
    sizes = [0, *itertools.accumulate(map(math.prod, shapes))]
    counts = left_before(len(shape) > 1 for shape in shapes)
    most = max((sizes[n + 1] - sizes[left] for n, left in enumerate(counts)), default=0)
    return most / max(1, sizes[-1])


def _rank_logits(config: RunConfig, layout: Layout, work: StepWork) -> float:
    """Return the number of logits that a rank has at a time, before tensor ranks divide them."""
    samples = layout.micro_batch_size / layout.divisor("sequences")
    return samples * _logits(work) * _chunk_fraction(config, samples * work.sample_length)


def _logits(work: StepWork) -> float:
    """Return the size of the largest result of a product outside the layers, for one sample."""
    sizes = (
        key.batch * key.m * key.n / SAMPLES
        for key in work.last.micro_ends.work
        if isinstance(key, Product) and key.phase == "forward"
    )
    return max(sizes, default=0.0)


def _chunk_fraction(config: RunConfig, positions: float) -> float:
    """Return the fraction of the positions of a micro-batch whose logits exist at a time."""
    chunk = config.train.loss_chunk
    return 1.0 if chunk is None else min(1.0, chunk / max(1.0, positions))


def _forward_flops(key: Operation, amount: Amount) -> float:
    if key.phase != "forward":
        return 0.0
    if isinstance(key, AttentionOp):
        return amount.count * 4 * key.heads * key.queries * key.keys * key.head_dim
    return amount.flops if isinstance(key, Product) else 0.0


def on_one_device(config: RunConfig) -> RunConfig:
    """Return a run of the same model on one device, with ``SAMPLES`` samples per step."""
    return with_values(
        config,
        {
            "strategy": StrategyConfig(data_parallel="none"),
            "train.global_batch_size": SAMPLES,
            "train.micro_batch_size": SAMPLES,
            "train.activation_checkpointing": "none",
            "train.compile": False,
            "train.optimizer_in_backward": False,
            **settings_for_ranks(1),
        },
    )


def activations(config: RunConfig) -> dict[str, ActivationBytes]:
    """Trace the activations of one sample for each mode of activation checkpointing.

    The trace uses two ranks that shard their parameters, so that parameters are not counted. It has
    no loss in chunks, because ``peak_bytes`` counts the chunk.

    Args:
        config: A run on one device, with ``SAMPLES`` samples per step.

    Raises:
        ConfigError: The run cannot be traced.
    """
    two_ranks = {"train.global_batch_size": 2 * SAMPLES, **settings_for_ranks(2)}
    unchunked = {"train.loss_chunk": None, **two_ranks}
    config = with_values(config, {"strategy.data_parallel": "fsdp", **unchunked})
    sizes = source_of(config).scaled_sizes()
    period, leading = sizes.period, sizes.leading
    depths = (period, 2 * period) if sizes.num_blocks else (0, 0)
    runs = []
    dispatches = sizes.num_blocks > 0 and _can_divide_experts(config)
    divided = with_values(config, {"strategy.expert.degree": 2})
    light = with_values(divided, {"estimate.routing": "skewed", "estimate.imbalance": _LIGHT_LOAD})
    for mode in _MODES:
        # Traces: two depths; the leading layers; divided experts at two depths, and at one with
        # fewer tokens.
        variants = [(config, layers, leading) for layers in depths]
        if leading:
            variants.append((config, depths[0], 0))
        if dispatches:
            variants += [(divided, layers, leading) for layers in depths]
            variants.append((light, depths[0], leading))
        for variant, layers, left_out in variants:
            with_mode = with_values(variant, {"train.activation_checkpointing": mode})
            short = reduced_config(with_mode, world_size=2, layers=layers, micro_batches=1)
            runs.append(partial(_activations, short, left_out=left_out))
    traced = iter(
        forked_map.map_forked(
            runs, task="tracing a step for its activations", memory=fake_tensor_cache.recipes
        )
    )
    activations_by_mode = {}
    regions = _regions(config)
    for mode in _MODES:
        shallow, deeper = (next(traced) / SAMPLES for _ in depths)
        layer = (deeper - shallow) / period
        of_leading = (next(traced) / SAMPLES - shallow) / leading if leading else 0.0
        dispatched = undispatched = 0.0
        if dispatches:
            balanced, deeper_balanced, lighter = (next(traced) / SAMPLES for _ in range(3))
            dispatched = (balanced - lighter) / (1 - _LIGHT_LOAD) / period
            undispatched = (deeper_balanced - balanced) / period - dispatched
        ends = 2 * shallow - deeper
        activations_by_mode[mode] = ActivationBytes(
            layer, ends, of_leading, dispatched, undispatched, regions
        )
    return activations_by_mode


def _regions(config: RunConfig) -> int:
    """Return the number of results in a repeated layer that tensor ranks sum.

    Attention and the feed-forward have one each. Shared experts have one beside the routed ones.
    """
    spec, model = spec_for(config), on_meta(config, seed=config.seed)
    *_, last = ("", *spec.blocks(model))
    styled = style_modules(model, spec.plan(model))
    experts = [each.name for each in styled if each.style == "experts"]
    summing = [each.name for each in styled if each.style in ROW_STYLES]
    routed = tuple(f"{name}." for name in experts)
    names = [*experts, *(name for name in summing if not name.startswith(routed))]
    return sum(name.startswith(f"{last}.") for name in names) or layer_activations.REGIONS


def _can_divide_experts(config: RunConfig) -> bool:
    return 2 in expert_degrees(spec_for(config), on_meta(config, seed=config.seed))


def peak_bytes(
    config: RunConfig,
    layout: Layout,
    rank: PipelineRank,
    *,
    work: StepWork,
    activations: dict[str, ActivationBytes],
    shares: TrainingShares,
    by_stream: bool = False,
) -> float:
    """Return the peak of a rank, in bytes.

    Args:
        config: Configuration of the run.
        layout: Parallel layout of the run.
        rank: The part of the model on the rank. It has 0 layers if those of the model are unknown;
            the model is then divided evenly.
        work: Work on one device, which contains the sizes of parameters.
        activations: Activations of one sample for each kind of recomputation.
        shares: Sizes of gradients and optimizer states relative to the parameters.
        by_stream: Whether to return the memory that an allocator reserves. Memory of the streams
            that gather and reduce, whose results are gradients, cannot be reused by other streams,
            so the peaks add up.
    """
    layer_bytes = work.first.step_layer.parameter_bytes
    layers, leading = rank.layers, rank.leading
    stage_fraction = 1.0 if layers else 1 / layout.pipeline
    looked_up, multiplied = _end_bytes(work, shares)
    ends = stage_fraction * (looked_up * rank.has_first + multiplied * rank.has_last)
    if rank.has_first and not rank.has_last:  # its copy of a weight that embedding and head share
        ends += shares.tied * _total_bytes(work)
    leading_bytes = work.leading.step.parameter_bytes
    of_leading = leading * leading_bytes
    total = (layers - leading) * layer_bytes + of_leading + ends
    expert_share = expert_load = 0.0
    if layout.expert > 1 and layers:
        expert_share = _expert_parameters(work, shares)
        expert_load = _expert_load(config.estimate.expert_load, layout, shares)
    samples = layout.micro_batch_size / layout.divisor("sequences")
    layer = layer_activations.layer_bytes(
        config,
        layout,
        work=work,
        activations=activations,
        expert_load=expert_load,
        has_leading=leading > 0,
    )
    is_recomputed = config.train.recomputation != "none"
    saved = activations[config.train.recomputation]
    # Only the stage with the loss keeps more than its layers. It frees this in its next backward.
    end_activations = saved.ends / layout.tensor if rank.has_last else 0.0
    if layout.tensor > 1 and rank.has_last:
        # The loss of tensor ranks, which divide the vocabulary, needs one copy in fp32 less.
        end_activations = max(0.0, end_activations - _FP32 * _logits(work) / layout.tensor)
    end_activations *= 1.0 if layers else stage_fraction * rank.in_flight
    end_activations *= _chunk_fraction(config, samples * work.sample_length)
    kept = (layers - leading) * layer.kept + leading * layer.kept_leading
    received = samples * rank.messages * layer.message
    moments = analytic_states.moments(
        config,
        layout,
        total=total,
        layer=layer_bytes,
        ends=ends,
        leading=(of_leading, leading_bytes if leading else 0.0),
        shares=replace(shares, looked_up=looked_up * rank.has_first / max(1.0, total)),
        expert_share=expert_share,
    )
    # Each forward in flight keeps its copies of weights in the compute type, without shards.
    cast = moments["loss"]["temporary"]
    # With a tensor axis, backward reads the weights of layers with a common input together, such as
    # those of a gate and its product, otherwise one at a time.
    read_at_once = (1 if layout.tensor == 1 else 2) / layout.tensor
    dequantized = read_at_once * shares.dequantized * _total_bytes(work)
    beside_layer = dequantized
    if is_recomputed and not layout.facts.shards_parameters:  # its weights are cast once more
        beside_layer += analytic_states.copy_ratio(config) * layer_bytes / layout.tensor
    moments["last block"]["temporary"] += beside_layer
    moments["first block"]["temporary"] += beside_layer
    # Without recomputation, a layer frees activations as gradients within it appear.
    in_backward = layer.recomputed + (layer.transient if is_recomputed else 0.0)
    # The first rank of a pipeline also computes the loss beside gradients.
    beside_kept = in_backward if layout.pipeline == 1 else max(in_backward, end_activations)
    peaks = [
        (
            _with_cast(moments["loss"], rank.in_flight, cast),
            rank.in_flight * kept + end_activations,
        ),
        (moments["first block"], in_backward),
        (moments["update"], 0.0),
    ]
    for in_flight, gradients in rank.during_backward:
        moment = _between(moments["loss"], moments["last block"], gradients)
        moment = _with_cast(moment, in_flight, cast)
        peaks.append((moment, in_flight * kept + beside_kept))
    for in_flight, awaiting in rank.awaiting_weights:
        moment = _with_cast(moments["last block"], in_flight, cast)
        bytes_ = in_flight * kept + awaiting * layers * layer.awaiting + layer.transient
        peaks.append((moment, bytes_))
    if not by_stream:
        return received + max(sum(moment.values()) + samples * bytes_ for moment, bytes_ in peaks)
    of_streams = sum(max(moment[name] for moment, _ in peaks) for name in _BESIDE_COMPUTE)
    return (
        received
        + of_streams
        + max(
            sum(size for name, size in moment.items() if name not in _BESIDE_COMPUTE)
            + samples * bytes_
            for moment, bytes_ in peaks
        )
    )


def _between(
    earlier: dict[Category, float], later: dict[Category, float], share: float
) -> dict[Category, float]:
    """Return the bytes when a share of the difference of two moments is reached."""
    return {name: (1 - share) * earlier[name] + share * later[name] for name in later}


def _with_cast(
    moment: dict[Category, float], in_flight: float, cast: float
) -> dict[Category, float]:
    """Return a moment with the cast weights of all forwards in flight; it contains those of one."""
    return {**moment, "temporary": moment["temporary"] + max(0.0, in_flight - 1) * cast}


def _end_bytes(work: StepWork, shares: TrainingShares) -> tuple[float, float]:
    """Return the bytes of embeddings, and of other parameters outside the layers.

    A weight that embedding and head share is one of the others.
    """
    ends = work.first.step_ends.parameter_bytes
    looked_up = min(ends, shares.looked_up * _total_bytes(work))
    return looked_up, ends - looked_up


def _total_bytes(work: StepWork) -> float:
    """Return the bytes of the model's parameters."""
    layers = work.num_repeated * work.first.step_layer.parameter_bytes
    of_leading = work.leading.count * work.leading.step.parameter_bytes
    return layers + of_leading + work.first.step_ends.parameter_bytes


def _expert_parameters(work: StepWork, shares: TrainingShares) -> float:
    """Return the share of experts in the parameters of a repeated layer."""
    layers = work.num_repeated * work.first.step_layer.parameter_bytes
    return min(1.0, shares.experts * _total_bytes(work) / layers) if layers else 0.0


def _expert_load(assumed: float, layout: Layout, shares: TrainingShares) -> float:
    """Return the load of a rank's experts, limited by the tokens that it can get.

    A token sends at most one row to each expert: with ``ep`` ranks and a fraction ``a`` of the
    experts per token, a rank gets at most ``min(ep, 1 / a)`` times the balanced number of rows.
    """
    return min(assumed, layout.expert, 1 / shares.active_experts)


def _activations(config: RunConfig, *, left_out: int) -> float:
    """Return the peak of activations and temporaries in bytes.

    The model is traced without compilation; compiled models need less. ``left_out`` layers are left
    out, from the first one.
    """
    config = with_values(config, {"train.compile": False})
    events = trace_rank(ReducedRun.of(config).without_first(left_out), 0).events
    update = next(n for n, event in enumerate(events) if event.name[0] == "update")
    indices = [CATEGORIES.index(category) for category in _TRANSIENT]
    points = (point for event in events[:update] for point in event.points)
    return float(max(sum(point[index] for index in indices) for point in points))
