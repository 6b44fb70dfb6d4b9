"""Computes learning rates.

A schedule is a pure function of the step, so it has no state to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.code.plugins import import_callable
from axonlaunch.config.optimization.schedules import (
    SCHEDULERS,
    ConstantConfig,
    CosineConfig,
    CustomScheduleConfig,
    InverseSqrtConfig,
    LinearConfig,
    SchedulerConfig,
    WSDConfig,
)

_TRIED = 16
"""Number of steps, spread over a run, whose rates are checked before the run starts."""


def learning_rate(schedule: SchedulerConfig, step: int, *, peak: float, steps: int) -> float:
    """Return the learning rate of a step.

    Args:
        schedule: Configuration of the schedule.
        step: Number of steps done before this one.
        peak: Peak learning rate of the optimizer or of a parameter group.
        steps: Total number of steps of the run.

    Raises:
        ConfigError: A schedule of the user fails, or returns no number from 0.
    """
    if not isinstance(schedule, ConstantConfig):
        return peak * _user_factor(schedule, step, steps)
    warmup = schedule.warmup(steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if isinstance(schedule, WSDConfig):
        decay = schedule.decay(steps)
        done = max(0.0, (step - (steps - decay) + 1) / decay)
        return peak * (1 - min(1.0, done) * (1 - schedule.final_lr_ratio))
    if isinstance(schedule, InverseSqrtConfig):
        timescale = schedule.timescale(steps)
        return peak * math.sqrt(timescale / (timescale + step - warmup))
    if not isinstance(schedule, CosineConfig):
        return peak
    done = (step - warmup) / max(1, steps - 1 - warmup)
    done = min(1.0, done)
    share = 1 - done if isinstance(schedule, LinearConfig) else (1 + math.cos(math.pi * done)) / 2
    return peak * (schedule.final_lr_ratio + (1 - schedule.final_lr_ratio) * share)


def schedule_issues(schedule: SchedulerConfig, *, steps: int) -> list[ConfigIssue]:
    """Return the problems of a user's schedule at some steps of a run, the last among them."""
    if isinstance(schedule, ConstantConfig):
        return []
    tried = sorted({*range(0, steps, max(1, steps // _TRIED)), steps - 1})
    try:
        for step in tried:
            _user_factor(schedule, step, steps)
    except ConfigError as error:
        return error.problems
    return []


def user_schedule(schedule: SchedulerConfig) -> Callable[[int, int], float]:
    """Return the function of a schedule that is not an included one.

    Raises:
        ConfigError: A custom schedule can't be imported, or does not accept its arguments.
    """
    if isinstance(schedule, CustomScheduleConfig):
        key, arguments = "scheduler.target", schedule.arguments
        function = import_callable(key, schedule.target, arguments, passed=2)
        return partial(function, **arguments)
    return SCHEDULERS.get(schedule.name)(schedule)


def _user_factor(schedule: SchedulerConfig, step: int, steps: int) -> float:
    """Return the factor of the peak rate that a user's schedule gives for a step.

    Raises:
        ConfigError: The schedule fails, or does not return a number of at least 0.
    """
    key, value = "scheduler.name", schedule.name
    if isinstance(schedule, CustomScheduleConfig):
        key, value = "scheduler.target", schedule.target
    function = user_schedule(schedule)
    try:
        factor: Any = function(step, steps)
    except Exception as error:  # user code may fail in any way
        issue = ConfigIssue.of_failure(key, f"computing the rate of step {step}", error, value)
        raise ConfigError([issue]) from error
    if not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 0:
        message = (
            f"it returns {factor!r} for step {step} of {steps}; return a number from 0, by which "
            "the peak rate is multiplied"
        )
        raise ConfigError([ConfigIssue(key, message, value)])
    return float(factor)
