"""Lists the possible layouts of a model, a number of devices and a batch size.

All sizes must divide evenly. Tensor parallelism stays inside a node, stages consist of full blocks,
and micro-batch sizes are powers of two. Memory and speed are not considered.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.axes import AXES, INNER, LIKE_DATA, OUTER
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.options.data_parallel import DATA_PARALLEL
from axonlaunch.config.problems.errors import divisors
from axonlaunch.config.values.plain_values import with_values
from axonlaunch.models.adapters.lora import linear_layer_sizes
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.scaled_sizes import ScaledSizes
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.planning.memory.pipeline_ranks import stage_layers
from axonlaunch.planning.search import keys
from axonlaunch.preflight.optimizer import layout_problems
from axonlaunch.preflight.parallelism import (
    expert_degrees,
    expert_state_problems,
    product_problems,
    state_problems,
)

_SCHEDULES = ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
_STAGES = ("auto", 3, 4)
"""Stages of a rank for schedules with a free number of them; the default is two."""
_MAX_STAGES = 32
_SHARDINGS = ("full_shard", "shard_grad_op", "hybrid_shard")
_STAGE_SHARDINGS = ("full_shard", "hybrid_shard")
"""Those of a pipeline, whose stages stay gathered between micro-batches: with full_shard they do
what they do with shard_grad_op."""
_LONG_SEQUENCE = 32_768
"""Sequence length from which context parallelism is considered even if there are enough samples."""
_SHORTEST_PART = 16_384
"""Positions of a rank below which a sequence is not divided among several nodes."""
_OFFLOADED = ("none", "optimizer_states", "params")
_LOGIT_BYTES = 16
"""Most bytes of each logit: in 16 bits and in fp32, its gradient in both, and its logarithm."""
_WORTH = 0.99
"""Longest time of a pipeline for which it is listed, relative to one with fewer stages per rank."""
_RECOMPUTATION = ("none", "selective", "full")
_OFFLOADED_INPUTS = "offload"
OFFLOAD_GAIN = 0.05
"""Share of the step time that a layout must gain by each kind of offload to be ranked first.

It is a choice: predictions are off by more, and copies to the host also depend on its memory, its
cores and its other processes, which no figure of the hardware describes.
"""
_NOT_SHARDED = {keys.SHARDING: "full_shard", keys.REPLICATE: "auto", keys.OFFLOAD: "none"}
"""Defaults of the settings that are valid only for sharded parameters."""


@dataclass(frozen=True)
class Candidate:
    """One layout.

    Attributes:
        config: Configuration of the run with this layout.
        layout: Parallel layout of the run.
        settings: Settings of the layout by dotted key.
        numerics: Descriptions of the settings that change the numerics of the run.
        logits_bytes: Upper limit of the bytes of a rank's logits that ``with_chunks`` saves; 0 if
            the loss is not computed in chunks.
    """

    config: RunConfig
    layout: Layout
    settings: Mapping[str, Any]
    numerics: tuple[str, ...] = ()
    logits_bytes: float = 0.0

    @property
    def family(self) -> tuple[Any, ...]:
        """Values of all settings except recomputation, offloading and chunks of the loss."""
        saving = (keys.RECOMPUTE, keys.OFFLOAD, keys.LOSS_CHUNK)
        return tuple(v for k, v in self.settings.items() if k not in saving)

    @property
    def offload(self) -> str:
        """Value of ``strategy.fsdp.cpu_offload``."""
        return str(self.settings.get(keys.OFFLOAD, "none"))

    @property
    def rank_factor(self) -> float:
        """Factor of the step time by which layouts are ranked: each kind of offload adds to it."""
        kinds = (self.offload != "none") + self.config.train.offloads_inputs
        return 1.0 + kinds * OFFLOAD_GAIN

    def with_chunks(self) -> Candidate:
        """Return the layout with its loss in chunks, which compute logits twice."""
        chunked = {keys.LOSS_CHUNK: keys.CHUNK}
        settings = {**self.settings, **chunked}
        return replace(
            self, config=with_values(self.config, chunked), settings=settings, logits_bytes=0.0
        )


def candidates(
    config: RunConfig,
    *,
    devices: int,
    in_node: int,
    fixed: Mapping[str, Any],
    offloads: bool = False,
) -> Iterator[Candidate]:
    """Yield every layout to consider.

    Args:
        config: Configuration of the run; its layout is ignored.
        devices: Number of devices.
        in_node: Number of devices per node.
        fixed: Settings from ``keys.SEARCHED`` that the user has set.
        offloads: Whether tensors can be offloaded to host memory.
    """
    options, nodes = partial(_options, fixed), RunNodes(devices // in_node, in_node)
    recomputation = [*_RECOMPUTATION, *([_OFFLOADED_INPUTS] if offloads else [])]
    batch, sizes = config.train.global_batch_size, source_of(config).scaled_sizes()
    spec, model = spec_for(config), on_meta(config, seed=config.seed)
    num_blocks = sizes.num_blocks or len(spec.blocks(model))
    plan = config.strategy.tensor.plan or spec.plan(model)
    vocabulary = 0 if keys.LOSS_CHUNK in fixed else _divisible_vocabulary(config, spec, model)
    pipelines = _Pipelines(num_blocks, _head_layers(spec, model), fixed)
    usual = {axis.name: [1] for axis in AXES}
    usual["pp"] = [n for n in divisors(devices) if n <= min(max(1, num_blocks), _MAX_STAGES)]
    if plan:
        usual["tp"] = [
            degree
            for degree in _power_of_two_divisors(in_node)
            if not _cuts_numbers(with_values(config, {keys.TENSOR: degree}), spec, plan, model)
        ]
    divisions = [False]
    if plan and not spec.no_sequence_parallelism():
        # Parts of the sequence cost as much traffic as full ones, unless a module needs the latter.
        divisions = [True] if "full_sequence" not in plan.values() else [False, True]
    if not spec.unshardable_sequences():
        most = max(in_node, (config.sequence_length or 1) // _SHORTEST_PART)
        usual["cp"] = [n for n in _power_of_two_divisors(devices) if n <= most]
    experts = expert_degrees(spec, model) or [1]
    if config.train.compile:
        if spec.most_experts(model):
            recomputation = ["none"]
        experts = [1]
    for degrees in _degrees(config, sizes, usual=usual, devices=devices, fixed=fixed):
        tensor, pipeline = degrees["tp"], degrees["pp"]
        ranks = devices // math.prod(degrees.values())
        if batch % ranks:
            continue
        parts = tensor * (2 * degrees["cp"] if degrees["cp"] > 1 else 1)
        is_even = not (config.sequence_length or 0) % parts
        with_strategy: dict[tuple[Any, ...], RunConfig] = {}
        for (
            (schedule, stages),
            (data_parallel, expert),
            size,
            divides_sequences,
            recompute,
        ) in itertools.product(
            pipelines.schedules() if pipeline > 1 else (("1f1b", "auto"),),
            _with_experts(
                _data_parallel_settings(
                    ranks * math.prod(degrees[name] for name in LIKE_DATA),
                    devices=devices,
                    in_node=max(1, in_node // tensor),
                    shardings=_SHARDINGS if pipeline == 1 else _STAGE_SHARDINGS,
                    offloads=offloads,
                    fixed=fixed,
                ),
                experts,
                ranks=devices // pipeline,
                tensor=tensor,
                in_node=in_node,
                fixed=fixed,
            ),
            options(keys.MICRO_BATCH, _power_of_two_divisors(batch // ranks)),
            options(keys.SEQUENCES, divisions if tensor > 1 and is_even else [False]),
            options(keys.RECOMPUTE, recomputation),
        ):
            if batch // ranks % size or (divides_sequences and tensor == 1):
                continue
            if not pipelines.allow(schedule, stages, pipeline, batch // ranks // size):
                continue
            rule = SCHEDULES[schedule]
            if rule.separate_weight_grad and recompute != "none":
                continue  # both halves of a backward would recompute
            strategy = {
                **data_parallel,
                keys.TENSOR: tensor,
                keys.SEQUENCES: divides_sequences,
                **{axis.key: degrees[axis.name] for axis in reversed((*OUTER, *INNER))},
                keys.EXPERT_RANKS: expert,
                keys.SCHEDULE: schedule,
                keys.STAGES: stages,
            }
            train = {
                keys.MICRO_BATCH: size,
                keys.RECOMPUTE: recompute,
                keys.LOSS_CHUNK: fixed.get(keys.LOSS_CHUNK, config.train.loss_chunk),
            }
            settings = {**strategy, **train}
            if all(settings[key] == value for key, value in fixed.items()):
                kind = (*strategy.values(),)
                if kind not in with_strategy:  # most of the time of a candidate
                    with_strategy[kind] = with_values(config, {**strategy, **nodes.settings})
                candidate_config = with_values(with_strategy[kind], train)
                layout = Layout.of(candidate_config, world_size=devices)
                if math.prod(layout.axes.values()) != devices:
                    continue  # replicas do not divide the ranks that read different samples
                if any(layout_problems(candidate_config, layout)):
                    continue
                if not any(expert_state_problems(candidate_config, spec, model)):
                    logits = 0.0 if rule.separate_weight_grad else _logits(layout, config)
                    yield Candidate(
                        candidate_config, layout, settings, logits_bytes=logits * vocabulary
                    )


def _cuts_numbers(
    config: RunConfig, spec: ModelSpec, plan: Mapping[str, str], model: nn.Module
) -> bool:
    """Return whether tensor ranks would cut tiles of products, or blocks of states, in 8 bits."""
    return any(product_problems(config, spec, model)) or any(
        state_problems(config, spec, plan, model)
    )


def _divisible_vocabulary(config: RunConfig, spec: ModelSpec, model: nn.Module) -> int:
    """Return the number of classes of each token, or 0 if no loss is computed in chunks of them."""
    train = config.train
    if train.defers_head or train.loss or config.sequence_length is None or spec.head is None:
        return 0
    head = spec.head_of(model)
    return 0 if head is None else linear_layer_sizes(head)[1]


def _logits(layout: Layout, config: RunConfig) -> float:
    """Return the bytes of logits of a rank's micro-batch for each class; 0 for a single chunk."""
    tokens = layout.micro_batch_size * (config.sequence_length or 1) // layout.divisor("sequences")
    return _LOGIT_BYTES * tokens / layout.tensor if tokens > keys.CHUNK else 0.0


def _head_layers(spec: ModelSpec, model: nn.Module) -> float:
    """Return the parameters of the head, relative to those of a block."""
    blocks = [model.get_submodule(name) for name in spec.blocks(model)]
    head = spec.head_of(model)
    if head is None or not blocks:
        return 0.0
    size = sum(p.numel() for p in head.parameters())
    return size * len(blocks) / max(1, sum(p.numel() for b in blocks for p in b.parameters()))


@dataclass(frozen=True)
class _Pipelines:
    """Schedules of a model.

    Attributes:
        num_blocks: Number of blocks of the model.
        head: Parameters of the head, relative to those of a block.
        fixed: Settings of the user.
    """

    num_blocks: int
    head: float
    fixed: Mapping[str, Any]

    def schedules(self) -> Iterator[tuple[str, Any]]:
        """Yield schedules with numbers of stages per rank."""
        for schedule in _options(self.fixed, keys.SCHEDULE, _SCHEDULES):
            usual = ("auto",) if SCHEDULES[schedule].fixed else _STAGES
            for stages in _options(self.fixed, keys.STAGES, usual):
                yield schedule, stages

    def allow(self, schedule: str, stages: Any, degree: int, micro_batches: int) -> bool:
        """Return whether a pipeline is legal, and faster than those with fewer stages per rank.

        More stages need more memory and messages. They are faster if ranks wait less for each
        other, or if blocks can be divided more evenly.
        """
        if degree == 1:
            return True
        rule = SCHEDULES[schedule]
        per_rank = rule.stages_per_rank if stages == "auto" else stages
        if rule.fixed and per_rank != rule.stages_per_rank:
            return False
        if degree * per_rank > self.num_blocks or not rule.fits(
            micro_batches, degree=degree, stages_per_rank=per_rank
        ):
            return False
        if rule.fixed or not self.fixed.keys().isdisjoint((keys.SCHEDULE, keys.STAGES)):
            return True
        fewer = min(self._time(degree, count, micro_batches) for count in range(1, per_rank))
        return self._time(degree, per_rank, micro_batches) < _WORTH * fewer

    def _time(self, degree: int, per_rank: int, micro_batches: int) -> float:
        """Return the time of a step in passes through a block (Narayanan et al., 2021)."""
        longest = _longest_stage(self.num_blocks, degree * per_rank, self.head)
        return (micro_batches * per_rank + degree - 1) * longest


@functools.cache
def _longest_stage(num_blocks: int, stages: int, head: float) -> float:
    *others, last = stage_layers(num_blocks, stages, head)
    return max(*others, last + head)


def _options(fixed: Mapping[str, Any], key: str, usual: Iterable[Any]) -> Iterable[Any]:
    """Return the values of a key to consider: the value set by the user, or the usual values."""
    return [fixed[key]] if key in fixed else usual


def _degrees(
    config: RunConfig,
    sizes: ScaledSizes,
    *,
    usual: Mapping[str, Iterable[int]],
    devices: int,
    fixed: Mapping[str, Any],
) -> Iterator[dict[str, int]]:
    """Yield degrees by the name of the axis."""
    heads = sizes.num_attention_heads  # 0 without attention: nothing to divide
    key_value_heads = sizes.num_key_value_heads
    # Tensor ranks of transformers' models can share key-value heads.
    can_share = source_of(config).code != "included"
    batch, length = config.train.global_batch_size, config.sequence_length or 1
    options = [_options(fixed, axis.key, usual[axis.name]) for axis in AXES]
    for combination in itertools.product(*options):
        degrees = {axis.name: degree for axis, degree in zip(AXES, combination, strict=True)}
        tensor, context = degrees["tp"], degrees["cp"]
        ranks = math.prod(degrees.values())
        if devices % ranks or heads % tensor:
            continue
        if key_value_heads % tensor and not (can_share and tensor % key_value_heads == 0):
            continue
        if context > 1:
            if length % (2 * context * tensor) or config.train.compile:
                continue
            is_usual = length >= _LONG_SEQUENCE or devices // (ranks // context) > batch
            if not is_usual and "strategy.context.degree" not in fixed:
                continue  # merging results costs time, and there are enough samples for all ranks
        yield degrees


def _data_parallel_settings(
    ranks: int,
    *,
    devices: int,
    in_node: int,
    shardings: Sequence[str],
    offloads: bool,
    fixed: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield the settings of data parallelism.

    A single device has nothing to shard, but it can offload as sharded parameters do.

    Args:
        ranks: Number of data-parallel ranks.
        devices: Number of devices of the run.
        in_node: Number of data-parallel ranks per node.
        shardings: Values of ``keys.SHARDING`` to consider.
        offloads: Whether sharded tensors can be offloaded to host memory.
        fixed: Settings of the user. Inexact variants are considered only if the user chose them.
    """
    for name, facts in DATA_PARALLEL.known_facts().items():
        is_chosen = name == fixed.get(keys.KIND)
        if facts.averages == "nothing" and ranks > 1:
            continue
        is_alone = facts.averages != "nothing" and ranks == 1
        can_offload = facts.shards_parameters and offloads and devices == 1
        if not is_chosen and (not facts.is_exact or (is_alone and not can_offload)):
            continue
        if facts.shards_parameters:
            for settings in _sharded_settings(
                name, ranks, in_node=in_node, shardings=shardings, offloads=offloads, fixed=fixed
            ):
                if is_chosen or not is_alone or settings[keys.OFFLOAD] != "none":
                    yield settings
        else:
            yield {keys.KIND: name, **_NOT_SHARDED}


def _sharded_settings(
    kind: str,
    ranks: int,
    *,
    in_node: int,
    shardings: Sequence[str],
    offloads: bool,
    fixed: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    for sharding, offload in itertools.product(
        _options(fixed, keys.SHARDING, shardings),
        _options(fixed, keys.OFFLOAD, _OFFLOADED if offloads else ("none",)),
    ):
        settings = {
            keys.KIND: kind,
            keys.SHARDING: sharding,
            keys.REPLICATE: "auto",
            keys.OFFLOAD: offload,
        }
        if sharding != "hybrid_shard":
            yield settings
            continue
        for replicas in _options(fixed, keys.REPLICATE, _replicas(ranks, in_node)):
            if ranks % replicas == 0:
                yield settings | {keys.REPLICATE: replicas}


def _replicas(ranks: int, in_node: int) -> list[int]:
    """Return the numbers of replicas for shards of half a node, and of one, two and four nodes."""
    shards = {in_node // 2, in_node, 2 * in_node, 4 * in_node}
    return [ranks // size for size in sorted(shards) if 1 < size < ranks]


def _with_experts(
    settings: Iterable[dict[str, Any]],
    degrees: list[int],
    *,
    ranks: int,
    tensor: int,
    in_node: int,
    fixed: Mapping[str, Any],
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield settings of data parallelism with degrees of the expert axis.

    Inside a node all degrees are considered; beyond it only those that are multiples of a node.

    Args:
        settings: Settings of data parallelism.
        degrees: Degrees that divide the experts of the model.
        ranks: Number of ranks of a pipeline stage.
        tensor: Degree of the tensor axis.
        in_node: Number of devices per node.
        fixed: Settings of the user.
    """
    for chosen in settings:
        of_a_copy = ranks // (chosen[keys.REPLICATE] if _is_hybrid(chosen) else 1)
        for degree in _options(fixed, keys.EXPERT_RANKS, degrees):
            if degree > 1:
                if not DATA_PARALLEL.facts(chosen[keys.KIND]).shards_parameters:
                    continue
                if chosen[keys.SHARDING] == "no_shard" or of_a_copy % degree or degree % tensor:
                    continue
                if degree > in_node and degree % in_node:
                    continue
            yield chosen, degree


def _is_hybrid(settings: Mapping[str, Any]) -> bool:
    return bool(settings[keys.SHARDING] == "hybrid_shard")


def _power_of_two_divisors(number: int) -> list[int]:
    """Return the powers of two that divide ``number``."""
    powers = [1]
    while number % (2 * powers[-1]) == 0:
        powers.append(2 * powers[-1])
    return powers
