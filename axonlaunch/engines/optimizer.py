"""Optimizers and learning-rate schedules, built from their configurations.

A schedule is a pure function of the step, so it has no state to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from axonlaunch.config.optimizer import (
    AdamWConfig,
    CosineConfig,
    LinearConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
    WSDConfig,
)


def build_optimizer(config: OptimizerConfig, parameters: Iterable[Tensor]) -> Optimizer:
    """Build an optimizer; matrices are decayed, vectors (biases, norms) are not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(config, AdamWConfig):
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    assert isinstance(config, SGDConfig)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def learning_rate(schedule: SchedulerConfig, *, peak: float, step: int, steps: int) -> float:
    """Return the rate of a step.

    Args:
        schedule: The shape and its figures.
        peak: The optimizer's rate.
        step: Steps done before this one.
        steps: Steps of the whole run.
    """
    warmup = schedule.warmup(steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if isinstance(schedule, WSDConfig):
        decay = schedule.decay_steps or max(1, steps // 5)
        done = max(0.0, (step - (steps - decay) + 1) / decay)
        return peak * (1 - min(1.0, done) * (1 - schedule.final_lr_ratio))
    if not isinstance(schedule, CosineConfig):
        return peak
    done = (step - warmup) / max(1, steps - 1 - warmup)
    done = min(1.0, done)
    share = 1 - done if isinstance(schedule, LinearConfig) else (1 + math.cos(math.pi * done)) / 2
    return peak * (schedule.final_lr_ratio + (1 - schedule.final_lr_ratio) * share)
