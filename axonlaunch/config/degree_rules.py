"""Rules between the degrees of a strategy, a world's size and the micro-batches of a step.

Torch-free; what follows from a model's sizes is checked by ``preflight``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from axonlaunch.config.axes import AXES, INNER, OUTER
from axonlaunch.config.errors import ConfigIssue, divisor_of, divisors, one_of
from axonlaunch.config.layout import (
    Layout,
    data_parallel_facts,
    model_ranks,
    stages_per_rank,
)
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.config.schema import PipelineConfig, RunConfig


def degree_issues(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield problems that don't depend on the world's size."""
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
                "the compiler multiplies what tensor ranks exchange of a divided sequence; add "
                f"{' '.join(missing)}, or remove this setting"
            )
            yield ConfigIssue("strategy.tensor.async_collectives", message, True)
    recomputes = config.train.activation_checkpointing == "full"
    if strategy.tensor.degree > 1 and config.train.compile and recomputes:
        message = (
            "torch's compiler can't compute again what strategy.tensor.degree divides; use "
            "selective or none, or train.compile=false"
        )
        yield ConfigIssue("train.activation_checkpointing", message, "full")
    averages = data_parallel_facts(strategy).averages
    for axis in AXES:
        if axis.same_parameters and axis.degree(strategy) > 1 and averages != "gradients":
            message = (
                f"{axis.ranks} have to sum gradients, and data_parallel is "
                f"{strategy.data_parallel}; use ddp, zero1 or fsdp, or 1"
            )
            yield ConfigIssue(axis.key, message, axis.degree(strategy))
    if strategy.pipeline.degree == 1:
        yield from _unused_pipeline(strategy.pipeline)
        return
    yield from _stages(config)
    rule, name = SCHEDULES[strategy.pipeline.schedule], strategy.pipeline.schedule
    if rule.separate_weight_grad and config.train.compile:
        message = (
            f"strategy.pipeline.schedule={name} computes weight gradients apart, which compiled "
            "blocks can't; use false, or a schedule that keeps backward whole"
        )
        yield ConfigIssue("train.compile", message, True)
    if rule.separate_weight_grad and config.train.activation_checkpointing == "selective":
        message = (
            f"strategy.pipeline.schedule={name} goes back through a block twice, for which "
            "selective recomputation has no second set of activations; use full or none"
        )
        yield ConfigIssue("train.activation_checkpointing", message, "selective")


def broken_world_degrees(config: RunConfig, *, world_size: int) -> list[ConfigIssue]:
    """Return the problem that the degrees don't divide the world, if they don't."""
    strategy = config.strategy
    needed = model_ranks(strategy)
    if world_size % needed == 0:
        return []
    degrees = {axis.key: axis.degree(strategy) for axis in (*OUTER, *INNER)}
    used = {key: degree for key, degree in degrees.items() if degree > 1}
    if len(used) == 1:
        [(key, degree)] = used.items()
        message = f"{world_size} ranks are not divisible by it; use {divisor_of(world_size)}"
        return [ConfigIssue(key, message, degree)]
    product = " x ".join(f"{key}={degree}" for key, degree in used.items())
    message = f"{product} take {needed} ranks; use {needed}, {2 * needed} or another multiple"
    return [ConfigIssue("launch.nproc", message, world_size)]


def broken_rounds(config: RunConfig, *, world_size: int) -> Iterator[ConfigIssue]:
    """Yield problems of the micro-batches that a pipeline's schedule is to order."""
    pipeline = config.strategy.pipeline
    if pipeline.degree == 1:
        return
    layout = Layout.of(config, world_size=world_size)
    rule = SCHEDULES[pipeline.schedule]
    degree, per_rank = pipeline.degree, layout.stages_per_rank
    asked = pipeline.microbatches
    if asked != "auto" and layout.micro_batches % asked:
        yield _rounds_problem(config, layout, f"a rank has {layout.micro_batches} per step")
        return
    if rule.fits(layout.microbatches_per_round, degree=degree, stages_per_rank=per_rank):
        return
    least = rule.least_microbatches(degree=degree, stages_per_rank=per_rank)
    wants = f"schedule={pipeline.schedule} on {degree} ranks needs at least {least} micro-batches"
    if layout.microbatches_per_round >= least:
        wants = (
            f"schedule={pipeline.schedule} needs micro-batches that fill rounds of about {degree}"
        )
    yield _rounds_problem(config, layout, wants)


def legal_micro_batch_sizes(config: RunConfig, *, share: int) -> list[int]:
    """Return the micro-batches that a rank's share of a step can be divided into."""
    return [size for size in divisors(share) if _fits(config, share // size)]


def _fits(config: RunConfig, count: int) -> bool:
    """Say whether the pipeline's schedule, if there is a pipeline, can order so many."""
    pipeline = config.strategy.pipeline
    if pipeline.degree == 1:
        return True
    rule, per_rank = SCHEDULES[pipeline.schedule], stages_per_rank(config.strategy)
    return rule.fits(count, degree=pipeline.degree, stages_per_rank=per_rank)


def _rounds_problem(config: RunConfig, layout: Layout, wants: str) -> ConfigIssue:
    """Blame the key that decides the number of micro-batches, and list what it may be."""
    pipeline = config.strategy.pipeline
    rule, share = SCHEDULES[pipeline.schedule], layout.micro_batch_size * layout.micro_batches
    if pipeline.microbatches != "auto":
        counts = [n for n in divisors(layout.micro_batches) if _fits(config, n)]
        legal = f"use {one_of(counts)}" if counts else "make train.micro_batch_size smaller"
        message = f"{wants}; {legal}"
        return ConfigIssue("strategy.pipeline.microbatches", message, pipeline.microbatches)
    sizes = legal_micro_batch_sizes(config, share=share)
    seen = f"a rank has {layout.micro_batches} of {layout.micro_batch_size} samples"
    if sizes and config.train.micro_batch_size != "auto":
        message = f"{wants}, {seen}; use {one_of(sizes)}"
        return ConfigIssue("train.micro_batch_size", message, config.train.micro_batch_size)
    least = rule.least_microbatches(degree=pipeline.degree, stages_per_rank=layout.stages_per_rank)
    message = f"{wants}, {seen}; use {least * layout.data_ranks} or a multiple of it"
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
        several = [name for name, other in SCHEDULES.items() if not other.fixed]
        message = (
            f"schedule={pipeline.schedule} has {rule.stages_per_rank}; "
            f"use {rule.stages_per_rank} or auto, or schedule={one_of(several)}"
        )
        yield ConfigIssue("strategy.pipeline.stages_per_rank", message, per_rank)
        return
    if pipeline.split == "auto":
        return
    stages = pipeline.degree * per_rank
    if len(pipeline.split) != stages:
        message = f"{pipeline.degree} ranks with {per_rank} each have {stages} stages; list so many"
        yield ConfigIssue("strategy.pipeline.split", message, pipeline.split)
    elif min(pipeline.split) < 1:
        message = "each stage holds at least 1 block"
        yield ConfigIssue("strategy.pipeline.split", message, pipeline.split)
