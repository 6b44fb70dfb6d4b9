"""Optimizers and learning-rate schedules, built from their configurations.

A schedule is a pure function of the step, so it has no state to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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
from axonlaunch.config.optimizer_states import optimizer_states


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


def new_states(
    config: OptimizerConfig, parameter: Tensor, *, device: torch.device
) -> dict[str, Tensor]:
    """Allocate what torch's optimizer would make of a parameter in its first step.

    A step with ``lr=0`` would not do: SGD adds ``weight_decay * parameter`` to the gradient before
    it fills the momentum, which would then begin with the decay of weights that may be replaced.

    AdamW begins with zeros itself. SGD has no momentum before its first step, in which it takes the
    gradient as it is: ``buffer = gradient``. Zeros give the same, ``0 * momentum + (1 - dampening)
    * gradient``, because ``build_optimizer`` leaves dampening at 0; with another they would not.

    Args:
        config: Of the optimizer.
        parameter: A whole tensor, or a DTensor whose states are divided as it is.
        device: Where the states are kept.
    """
    return {
        state.name: _zeros_like(parameter, device)
        if state.elementwise
        else torch.zeros((), dtype=torch.float32, device=device)
        for state in optimizer_states(config)
    }


def _zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    # What is copied to a device in every update is in page-locked memory, as ``offload`` keeps it.
    pinned = local.is_cuda and device.type == "cpu"
    zeros = torch.zeros_like(local, device=device, pin_memory=pinned)
    if not isinstance(tensor, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def learning_rate(schedule: SchedulerConfig, step: int, *, peak: float, steps: int) -> float:
    """Return the rate of a step.

    Args:
        schedule: The shape and its figures.
        step: Steps done before this one.
        peak: The optimizer's rate.
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
