"""Makes a run demanding in the few steps that are compared, where its configuration is not.

A run that accumulates nothing can't show that accumulation is right. What divides the work stays
as it is; how much there is of it, and how the rate and the gradient's limit lie, is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.config.optimizer import MuonConfig
from axonlaunch.config.plugins import import_plugins
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.engines.data_parallel import fsdp, zero1
from axonlaunch.engines.precision import policy as precision
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.preflight.checks import find_issues
from axonlaunch.verification.comparison_plan import FIRST_SCALE, ComparisonPlan
from axonlaunch.verification.plain_model import has_batch_norm
from axonlaunch.verification.plain_optimizer import class_of
from axonlaunch.verification.reference import NoReferenceError
from axonlaunch.verification.reference_runs import gradient_norms

# AdamW divides by a gradient's size, and Lion takes its sign. Where that is nothing but rounding,
# as for the bias of keys, which softmax ignores, their usual eps would make whole steps in random
# directions of it.
_LEAST_EPS = 1e-4
_ACCUMULATION = 2
"""Micro-batches of a step, or rounds of a pipeline's schedule."""
_NORMED = 4
"""Samples of a micro-batch that is normalised."""
_WARMUP = 2
_STEPS_LEFT = 4
"""Steps that the run would have after those that are compared, so that the rate still falls."""
_BUCKETS = 6
_DECAY = 0.1
_TRIED = 3
"""Steps whose norms say where a limit lies that some gradients reach, and others don't."""

_SMALL_BYTES = 2**10
_TOGETHER_BYTES = 2**11
"""Bytes of parameters that travel alone, and together, in place of zero1's: models are small."""


def demanding(config: RunConfig, plan: ComparisonPlan) -> RunConfig:
    """Return a run in the same layout, changed so that more faults would show.

    Args:
        config: Checked and resolved.
        plan: How long it is.
    """
    import_plugins(config.plugins)
    for settings in ({**_batch(config), **_update(config, plan)}, _update(config, plan)):
        changed = with_values(config, settings)
        if not find_issues(changed, devices=None):
            return _with_clipping(changed)
    return config


def _batch(config: RunConfig) -> dict[str, Any]:
    """Return a batch that each rank works on in several micro-batches, a pipeline in rounds."""
    layout = Layout.of(config, world_size=num_ranks(config))
    pipeline = config.strategy.pipeline
    chosen = config.train.micro_batch_size
    settings: dict[str, Any] = {}
    in_round = 1
    size = 1 if layout.pipeline > 1 and spec_for(config).inputs == "tokens" else 2
    if has_batch_norm(on_meta(config, seed=config.seed)):
        size = _NORMED  # of two samples it makes 1 and -1, whose gradient is a rest of rounding
    if chosen != "auto":
        size = chosen
    if layout.pipeline > 1:
        in_round = _round(layout) if pipeline.microbatches == "auto" else pipeline.microbatches
        settings["strategy.pipeline.microbatches"] = in_round
    settings["train.micro_batch_size"] = size
    batch = layout.data_ranks * size * in_round * _ACCUMULATION
    return {**settings, "train.global_batch_size": batch}


def _round(layout: Layout) -> int:
    """Return the micro-batches of the shortest round that fills the pipeline."""
    rule, stages = SCHEDULES[layout.schedule], layout.num_stages
    counts = range(stages, 4 * stages + 1)
    shape = {"degree": layout.pipeline, "stages_per_rank": layout.stages_per_rank}
    return next((count for count in counts if rule.fits(count, **shape)), stages)


def _update(config: RunConfig, plan: ComparisonPlan) -> dict[str, Any]:
    """Return a rate that changes with each step, decay, and buckets that are full early."""
    settings: dict[str, Any] = {"train.steps": plan.steps + _STEPS_LEFT}
    schedule = config.scheduler
    if schedule.name == "constant":  # its warm-up is all that changes
        settings["scheduler.warmup_steps"] = plan.steps + _STEPS_LEFT
    elif schedule.warmup_steps == "auto" or schedule.warmup_steps > _WARMUP:
        settings["scheduler.warmup_steps"] = _WARMUP
    if schedule.name == "wsd":
        settings["scheduler.decay_steps"] = plan.steps + _STEPS_LEFT - _WARMUP
    if getattr(config.optimizer, "weight_decay", None) == 0:
        settings["optimizer.weight_decay"] = _DECAY
    if Layout.of(config, world_size=num_ranks(config)).facts.section == "ddp":
        parameters = on_meta(config, seed=config.seed).parameters()
        size = 4 * sum(p.numel() for p in parameters if p.requires_grad) / _BUCKETS / 2**20
        if 0 < size < config.strategy.ddp.bucket_size_mb:
            settings["strategy.ddp.bucket_size_mb"] = size
    return settings


def _with_clipping(config: RunConfig) -> RunConfig:
    """Put the limit of the gradient's norm where some steps reach it, and others do not."""
    if config.train.grad_clip is None:
        return config
    try:
        norms = sorted(gradient_norms(config, steps=_TRIED))
    except NoReferenceError:  # the comparison itself says why
        return config
    between = sum(norms[:2]) / 2
    if not math.isfinite(between) or between <= 0:
        return config
    return with_values(config, {"train.grad_clip": float(f"{between:.2e}")})


@contextmanager
def lowered_thresholds(plan: ComparisonPlan) -> Iterator[None]:
    """Lower thresholds, so that small parameters and few steps exercise the paths of large ones.

    They travel alone, and in several buckets; fp16's loss scale grows.

    Args:
        plan: How many steps those are.
    """
    before = zero1._LARGE, zero1._FULL, fsdp.LARGE_UNIT
    scale = precision._FIRST_SCALE, precision._GROWTH_INTERVAL
    zero1._LARGE, zero1._FULL, fsdp.LARGE_UNIT = _SMALL_BYTES, _TOGETHER_BYTES, _SMALL_BYTES
    precision._FIRST_SCALE, precision._GROWTH_INTERVAL = FIRST_SCALE, plan.growth_interval
    try:
        yield
    finally:
        zero1._LARGE, zero1._FULL, fsdp.LARGE_UNIT = before
        precision._FIRST_SCALE, precision._GROWTH_INTERVAL = scale


def with_smooth_updates(config: RunConfig) -> RunConfig:
    """Return a run whose updates are smooth where a gradient is nothing but rounding."""
    optimizer, eps = config.optimizer, getattr(config.optimizer, "eps", None)
    if isinstance(optimizer, MuonConfig):
        # Its iteration multiplies what is small by 3.4445 each time, and rounds to bf16 before it:
        # five of them make 1e-3 of a gradient's last bit.
        eps = max(optimizer.adamw_eps, _LEAST_EPS)
        return with_values(config, {"optimizer.adamw_eps": eps, "optimizer.ns_steps": 1})
    if isinstance(eps, tuple):  # Adafactor's: of squares, and of parameters' sizes
        return with_values(config, {"optimizer.eps": (max(eps[0] or 0, _LEAST_EPS), *eps[1:])})
    if isinstance(eps, float):
        return with_values(config, {"optimizer.eps": max(eps, _LEAST_EPS)})
    arguments = getattr(optimizer, "arguments", None)
    if arguments is not None:
        known = signature(class_of(optimizer)).parameters.get("eps")
        eps = arguments.get("eps", None if known is None else known.default)
        if isinstance(eps, float):
            smooth = {**arguments, "eps": max(eps, _LEAST_EPS)}
            return with_values(config, {"optimizer.arguments": smooth})
    return config
