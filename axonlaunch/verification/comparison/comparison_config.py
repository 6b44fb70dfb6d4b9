"""Changes a run's configuration so that few steps exercise many features.

For example, a run without gradient accumulation cannot show that accumulation is correct. The
strategy is unchanged. The batch size, the number of steps, the learning rate's warm-up, weight
decay and the clipping limit can change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.optimization.optimizer import FreeOptimizerConfig, MuonConfig
from axonlaunch.config.optimization.schedules import ConstantConfig
from axonlaunch.config.values.optional_keys import balances_by_bias, weight_decay
from axonlaunch.engines.data_parallel import fsdp, zero1
from axonlaunch.engines.precision import policy as precision
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.preflight.checks import find_issues
from axonlaunch.verification.references.comparison_plan import FIRST_SCALE, ComparisonPlan
from axonlaunch.verification.references.plain_model import has_batch_norm
from axonlaunch.verification.references.plain_optimizer import class_of
from axonlaunch.verification.references.reference import NoReferenceError
from axonlaunch.verification.references.reference_runs import gradient_norms

# AdamW divides by the gradient's size, and Lion takes its sign. If a gradient consists of rounding
# errors only (the bias of attention keys, which softmax ignores), the usual eps leads to full steps
# in random directions.
_MIN_EPS = 1e-4
_ACCUMULATION = 2
"""Micro-batches of a step, or rounds of a pipeline schedule."""
_BATCH_NORM_SAMPLES = 4
"""Samples of a micro-batch if the model has batch normalization."""
_WARMUP = 2
_STEPS_LEFT = 4
"""Steps of the run after the compared ones, so that the learning rate still decreases."""
_BUCKETS = 6
_DECAY = 0.1
_BALANCE_RATE = 0.05
"""Smallest step of the biases of routers: larger than what rounding in 16 bits allows to differ."""
_NORM_STEPS = 3
"""Steps with gradient norms that determine a limit between these norms."""

_SMALL_BYTES = 2**10
_TOGETHER_BYTES = 2**11
"""Thresholds that replace those of zero1 and fsdp: bytes of a parameter that gets its own message,
and bytes of a bucket. Compared models are small.
"""


def harder_config(config: RunConfig, plan: ComparisonPlan) -> RunConfig:
    """Return a configuration with the same layout that shows more faults.

    Args:
        config: Checked and resolved configuration.
        plan: Length and scope of the comparison.
    """
    import_plugins(config.plugins)
    for settings in ({**_batch(config), **_update(config, plan)}, _update(config, plan)):
        changed = with_values(config, settings)
        if not find_issues(changed, devices=None):
            return _with_clipping(changed)
    return config


def _batch(config: RunConfig) -> dict[str, Any]:
    """Return settings for several micro-batches on each rank, or several rounds of a pipeline."""
    layout = Layout.of(config, world_size=num_ranks(config))
    pipeline = config.strategy.pipeline
    configured = config.train.micro_batch_size
    settings: dict[str, Any] = {}
    per_round = 1
    size = 1 if layout.pipeline > 1 and spec_for(config).inputs == "tokens" else 2
    if has_batch_norm(on_meta(config, seed=config.seed)):
        # Two samples are normalized to 1 and -1, with a gradient that consists of rounding errors.
        size = _BATCH_NORM_SAMPLES
    if configured != "auto":
        size = configured
    if layout.pipeline > 1:
        per_round = (
            _round_size(layout) if pipeline.microbatches == "auto" else pipeline.microbatches
        )
        settings["strategy.pipeline.microbatches"] = per_round
    settings["train.micro_batch_size"] = size
    batch = layout.data_ranks * size * per_round * _ACCUMULATION
    return {**settings, "train.global_batch_size": batch}


def _round_size(layout: Layout) -> int:
    """Return the number of micro-batches of the shortest round that fills the pipeline."""
    rule, stages = SCHEDULES[layout.schedule], layout.num_stages
    counts = range(stages, 4 * stages + 1)
    shape = {"degree": layout.pipeline, "stages_per_rank": layout.stages_per_rank}
    return next((count for count in counts if rule.fits(count, **shape)), stages)


def _update(config: RunConfig, plan: ComparisonPlan) -> dict[str, Any]:
    """Return settings for a rate that changes in each step, weight decay and small buckets."""
    settings: dict[str, Any] = {"train.steps": plan.steps + _STEPS_LEFT}
    settings["train.matmul_start_step"] = min(config.train.matmul_start_step, _WARMUP)
    schedule = config.scheduler
    if schedule.name == "constant":  # only its warm-up changes the rate
        settings["scheduler.warmup_steps"] = plan.steps + _STEPS_LEFT
    elif isinstance(schedule, ConstantConfig) and schedule.warmup_steps not in range(_WARMUP):
        settings["scheduler.warmup_steps"] = _WARMUP
    if schedule.name == "wsd":
        settings["scheduler.decay_steps"] = plan.steps + _STEPS_LEFT - _WARMUP
        settings["scheduler.decay_ratio"] = None
    if weight_decay(config.optimizer) == 0:
        settings["optimizer.weight_decay"] = _DECAY
    described: Any = config.model
    if balances_by_bias(described):
        settings["model.balance_rate"] = max(described.balance_rate, _BALANCE_RATE)
    if Layout.of(config, world_size=num_ranks(config)).facts.section == "ddp":
        parameters = on_meta(config, seed=config.seed).parameters()
        size = 4 * sum(p.numel() for p in parameters if p.requires_grad) / _BUCKETS / 2**20
        if 0 < size < config.strategy.ddp.bucket_size_mb:
            settings["strategy.ddp.bucket_size_mb"] = size
    return settings


def _with_clipping(config: RunConfig) -> RunConfig:
    """Set the clipping limit so that only some steps exceed it."""
    if config.train.grad_clip is None:
        return config
    try:
        norms = sorted(gradient_norms(config, steps=_NORM_STEPS))
    except NoReferenceError:  # the comparison will report it
        return config
    between = sum(norms[:2]) / 2
    if not math.isfinite(between) or between <= 0:
        return config
    return with_values(config, {"train.grad_clip": float(f"{between:.2e}")})


@contextmanager
def lowered_thresholds(plan: ComparisonPlan) -> Iterator[None]:
    """Lower thresholds, so that small models and few steps use the code for large ones.

    Some parameters get their own message, others fill several buckets, and the fp16 loss scale
    grows.

    Args:
        plan: Length of the comparison.
    """
    thresholds = zero1._LARGE, zero1._FULL, fsdp.LARGE_UNIT
    scale = precision._FIRST_SCALE, precision._GROWTH_INTERVAL
    zero1._LARGE, zero1._FULL, fsdp.LARGE_UNIT = _SMALL_BYTES, _TOGETHER_BYTES, _SMALL_BYTES
    precision._FIRST_SCALE, precision._GROWTH_INTERVAL = FIRST_SCALE, plan.growth_interval
    try:
        yield
    finally:
        zero1._LARGE, zero1._FULL, fsdp.LARGE_UNIT = thresholds
        precision._FIRST_SCALE, precision._GROWTH_INTERVAL = scale


def with_smooth_updates(config: RunConfig) -> RunConfig:
    """Return a configuration with an eps that limits updates by rounding errors of gradients.

    Updates run after backward, because gradients are compared between the two.
    """
    config = with_values(config, {"train.optimizer_in_backward": False})
    optimizer, eps = config.optimizer, getattr(config.optimizer, "eps", None)
    if isinstance(optimizer, MuonConfig):
        # Each iteration of Muon multiplies small values by 3.4445 and rounds to bf16. After five
        # iterations the last bit of a gradient has grown to 1e-3.
        eps = max(optimizer.adamw_eps, _MIN_EPS)
        return with_values(config, {"optimizer.adamw_eps": eps, "optimizer.ns_steps": 1})
    if isinstance(eps, tuple):  # Adafactor: for squared gradients and for sizes of parameters
        return with_values(config, {"optimizer.eps": (max(eps[0] or 0, _MIN_EPS), *eps[1:])})
    if isinstance(eps, float):
        return with_values(config, {"optimizer.eps": max(eps, _MIN_EPS)})
    if isinstance(optimizer, FreeOptimizerConfig):
        parameter = signature(class_of(optimizer)).parameters.get("eps")
        eps = optimizer.arguments.get("eps", None if parameter is None else parameter.default)
        if isinstance(eps, float):
            smooth = {**optimizer.arguments, "eps": max(eps, _MIN_EPS)}
            return with_values(config, {"optimizer.arguments": smooth})
    return config
