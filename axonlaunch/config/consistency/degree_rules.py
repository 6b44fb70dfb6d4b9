"""Rules between the degrees of a strategy, the number of ranks and the micro-batches of a step.

``preflight`` checks rules that depend on the sizes of the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from axonlaunch.config.axes import AXES, DP_SHARD, INNER, OUTER
from axonlaunch.config.consistency.layout import (
    Layout,
    data_parallel_facts,
    model_ranks,
    stages_per_rank,
)
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.options.data_parallel import DEFAULT
from axonlaunch.config.problems.errors import ConfigIssue, divisor_of, divisors, one_of
from axonlaunch.config.schema import ExpertConfig, PipelineConfig, RunConfig
from axonlaunch.config.values.optional_keys import num_experts

EXPERT_DEGREE = "strategy.expert.degree"


def degree_issues(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield problems that do not depend on the number of ranks."""
    strategy = config.strategy
    if strategy.tensor.sequence_parallel and strategy.tensor.degree == 1:
        message = "strategy.tensor.degree is 1; use 2 or more, or remove this setting"
        yield ConfigIssue("strategy.tensor.sequence_parallel", message, True)
    if strategy.tensor.async_collectives:
        needed = {
            "strategy.tensor.degree=2": strategy.tensor.degree > 1,
            "strategy.tensor.sequence_parallel=true": strategy.tensor.sequence_parallel,
            "train.compile=true": config.train.compile,
        }
        if missing := [key for key, is_there in needed.items() if not is_there]:
            message = (
                "it overlaps collectives on split sequences in compiled blocks; add "
                f"{' '.join(missing)}, or remove this setting"
            )
            yield ConfigIssue("strategy.tensor.async_collectives", message, True)
    averages = data_parallel_facts(strategy).averages
    for axis in AXES:
        if axis.sums_gradients and axis.degree(strategy) > 1 and averages != "gradients":
            kind = strategy.data_parallel
            message = (
                f"{axis.ranks} must sum gradients, but data_parallel is {kind}; "
                "use strategy.data_parallel=ddp, zero1 or fsdp, or degree 1"
            )
            yield ConfigIssue(axis.key, message, axis.degree(strategy))
    yield from _experts(config)
    if strategy.pipeline.degree == 1:
        yield from _unused_pipeline(strategy.pipeline)
        return
    yield from _stages(config)
    rule, name = SCHEDULES[strategy.pipeline.schedule], strategy.pipeline.schedule
    if rule.separate_weight_grad and config.train.compile:
        others = one_of([other for other in SCHEDULES if not SCHEDULES[other].separate_weight_grad])
        message = (
            f"strategy.pipeline.schedule={name} computes weight gradients separately, which "
            f"compiled blocks can't do; use false, or strategy.pipeline.schedule={others}"
        )
        yield ConfigIssue("train.compile", message, True)
    if rule.separate_weight_grad and config.train.recomputation == "selective":
        message = (
            f"strategy.pipeline.schedule={name} runs backward through a block twice, but selective "
            "recomputation provides the activations only once; use full, offload or none"
        )
        mode = config.train.activation_checkpointing
        yield ConfigIssue("train.activation_checkpointing", message, mode)


def _experts(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield problems of an expert degree with the other settings."""
    strategy = config.strategy
    key, degree = EXPERT_DEGREE, strategy.expert.degree
    if degree == 1:
        if (dispatch := strategy.expert.dispatch) != ExpertConfig.dispatch:
            message = f"needs ranks that share experts, but {key} is 1; use 2 or more there"
            yield ConfigIssue("strategy.expert.dispatch", message, dispatch)
        return
    if not data_parallel_facts(strategy).shards_parameters:
        kind = strategy.data_parallel or DEFAULT
        message = (
            f"data_parallel={kind} keeps all experts on every rank; use "
            "strategy.data_parallel=fsdp, or degree 1"
        )
        yield ConfigIssue(key, message, degree)
    if config.train.compile:
        message = (
            f"the number of tokens that {key} exchanges is known only in the step, and "
            "torch.compile would compile each number separately; use false"
        )
        yield ConfigIssue("train.compile", message, True)


def broken_world_degrees(config: RunConfig, *, world_size: int) -> list[ConfigIssue]:
    """Return the problem if the degrees do not divide the number of ranks."""
    strategy = config.strategy
    needed = model_ranks(strategy)
    if world_size % needed == 0:
        return _broken_expert_degree(config, world_size=world_size)
    degrees = {axis.key: axis.degree(strategy) for axis in (*OUTER, *INNER)}
    used = {key: degree for key, degree in degrees.items() if degree > 1}
    if len(used) == 1:
        [(key, degree)] = used.items()
        message = f"{world_size} ranks are not divisible by it; use {divisor_of(world_size)}"
        return [ConfigIssue(key, message, degree)]
    product = " x ".join(f"{key}={degree}" for key, degree in used.items())
    message = f"{product} take {needed} ranks; use {needed}, {2 * needed} or another multiple"
    return [ConfigIssue("launch.nproc", message, world_size)]


def _broken_expert_degree(config: RunConfig, *, world_size: int) -> list[ConfigIssue]:
    """Return the problem if the ranks of a replica or of a layer do not allow the expert degree."""
    strategy = config.strategy
    degree, tensor = strategy.expert.degree, strategy.tensor.degree
    ranks = _ranks_of_a_copy(config, world_size=world_size)
    shards = data_parallel_facts(strategy).shards_parameters
    if degree == 1 or not shards or not (ranks % degree or degree % tensor):
        return []
    legal = expert_degrees_of_ranks(config, world_size=world_size)
    experts = num_experts(config.model)
    if experts is not None:
        use = one_of([count for count in legal if experts % count == 0])
    else:
        use = f"{one_of(legal)}; the degree must also divide the number of experts"
    message = (
        f"{experts or 'the'} experts are split among the {ranks} ranks that share one copy of the "
        f"parameters; use {use}"
    )
    if degree % tensor:
        message = (
            f"the strategy.tensor.degree={tensor} ranks that share a layer must share its experts; "
            f"use {use}"
        )
    return [ConfigIssue(EXPERT_DEGREE, message, degree)]


def expert_degrees_of_ranks(config: RunConfig, *, world_size: int) -> list[int]:
    """Return the expert degrees that the ranks of a replica allow, for any number of experts."""
    tensor = config.strategy.tensor.degree
    ranks = _ranks_of_a_copy(config, world_size=world_size)
    return [count for count in divisors(ranks) if count == 1 or count % tensor == 0]


def _ranks_of_a_copy(config: RunConfig, *, world_size: int) -> int:
    axes = Layout.of(config, world_size=world_size).axes
    return math.prod(axes[name] for name in (DP_SHARD, *(axis.name for axis in INNER)))


def broken_rounds(config: RunConfig, *, world_size: int) -> Iterator[ConfigIssue]:
    """Yield problems of the number of micro-batches of a pipeline schedule."""
    pipeline = config.strategy.pipeline
    if pipeline.degree == 1:
        return
    layout = Layout.of(config, world_size=world_size)
    rule = SCHEDULES[pipeline.schedule]
    degree, per_rank = pipeline.degree, layout.stages_per_rank
    per_round = pipeline.microbatches
    if per_round != "auto" and layout.micro_batches % per_round:
        yield _rounds_problem(config, layout, f"a rank has {layout.micro_batches} per step")
        return
    if rule.fits(layout.microbatches_per_round, degree=degree, stages_per_rank=per_rank):
        return
    least = rule.least_microbatches(degree=degree, stages_per_rank=per_rank)
    requirement = (
        f"schedule={pipeline.schedule} on {degree} ranks needs at least {least} micro-batches"
    )
    if layout.microbatches_per_round >= least:
        requirement = (
            f"schedule={pipeline.schedule} needs micro-batches that fill rounds of about {degree}"
        )
    yield _rounds_problem(config, layout, requirement)


def legal_micro_batch_sizes(config: RunConfig, *, share: int) -> list[int]:
    """Return the valid micro-batch sizes for a rank's share of the global batch."""
    return [size for size in divisors(share) if _fits(config, share // size)]


def _fits(config: RunConfig, count: int) -> bool:
    """Return whether the pipeline schedule, if any, supports a number of micro-batches."""
    pipeline = config.strategy.pipeline
    if pipeline.degree == 1:
        return True
    rule, per_rank = SCHEDULES[pipeline.schedule], stages_per_rank(config.strategy)
    return rule.fits(count, degree=pipeline.degree, stages_per_rank=per_rank)


def _rounds_problem(config: RunConfig, layout: Layout, requirement: str) -> ConfigIssue:
    """Return a problem of the key that sets the number of micro-batches, with its valid values."""
    pipeline = config.strategy.pipeline
    rule, share = SCHEDULES[pipeline.schedule], layout.micro_batch_size * layout.micro_batches
    if pipeline.microbatches != "auto":
        counts = [n for n in divisors(layout.micro_batches) if _fits(config, n)]
        legal = f"use {one_of(counts)}" if counts else "make train.micro_batch_size smaller"
        message = f"{requirement}; {legal}"
        return ConfigIssue("strategy.pipeline.microbatches", message, pipeline.microbatches)
    sizes = legal_micro_batch_sizes(config, share=share)
    actual = f"a rank has {layout.micro_batches} of {layout.micro_batch_size} samples"
    if sizes and config.train.micro_batch_size != "auto":
        message = f"{requirement}, {actual}; use {one_of(sizes)}"
        return ConfigIssue("train.micro_batch_size", message, config.train.micro_batch_size)
    least = rule.least_microbatches(degree=pipeline.degree, stages_per_rank=layout.stages_per_rank)
    message = f"{requirement}, {actual}; use {least * layout.data_ranks} or a multiple of it"
    return ConfigIssue("train.global_batch_size", message, config.train.global_batch_size)


def _unused_pipeline(pipeline: PipelineConfig) -> Iterator[ConfigIssue]:
    defaults = PipelineConfig()
    for field in dataclasses.fields(pipeline):
        value = getattr(pipeline, field.name)
        if value != getattr(defaults, field.name):
            message = "strategy.pipeline.degree is 1; use 2 or more, or remove this setting"
            yield ConfigIssue(f"strategy.pipeline.{field.name}", message, value)


def _stages(config: RunConfig) -> Iterator[ConfigIssue]:
    pipeline = config.strategy.pipeline
    rule, per_rank = SCHEDULES[pipeline.schedule], stages_per_rank(config.strategy)
    if rule.fixed and per_rank != rule.stages_per_rank:
        flexible = [name for name, other in SCHEDULES.items() if not other.fixed]
        message = (
            f"schedule={pipeline.schedule} has {rule.stages_per_rank}; "
            f"use {rule.stages_per_rank} or auto, or schedule={one_of(flexible)}"
        )
        yield ConfigIssue("strategy.pipeline.stages_per_rank", message, per_rank)
        return
    if pipeline.split == "auto":
        return
    stages = pipeline.degree * per_rank
    if len(pipeline.split) != stages:
        total = f"{pipeline.degree} ranks with {per_rank} each have {stages} stages"
        message = f"{total}; list {stages} numbers"
        yield ConfigIssue("strategy.pipeline.split", message, pipeline.split)
    elif min(pipeline.split) < 1:
        message = "each stage holds at least 1 block"
        yield ConfigIssue("strategy.pipeline.split", message, pipeline.split)
