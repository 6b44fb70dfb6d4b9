"""Typed configurations of optimizers and learning-rate schedules.

It holds values; ``axonlaunch.engines.optimizer.optimizers`` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019), torch's fused kernel."""

    name: str = "adamw"
    """name of the optimizer"""
    lr: float = field(default=3e-4, metadata={"min": 0})
    """peak learning rate"""
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    """decoupled decay of matrices; vectors (biases, norms) are not decayed"""
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"min": 0, "below": 1})
    """decay of the first and second moment's running averages"""
    eps: float = field(default=1e-8, metadata={"above": 0})
    """added to the denominator"""


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent with momentum."""

    name: str = "sgd"
    """name of the optimizer"""
    lr: float = field(default=0.1, metadata={"min": 0})
    """peak learning rate"""
    weight_decay: float = field(default=0.0, metadata={"min": 0})
    """L2 penalty on matrices; vectors (biases, norms) have none"""
    momentum: float = field(default=0.9, metadata={"min": 0, "below": 1})
    """share of the last update that is kept"""
    nesterov: bool = False
    """look ahead along the momentum"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        if self.nesterov and self.momentum == 0:
            return [
                (
                    "nesterov",
                    "needs momentum above 0; set optimizer.momentum=0.9 or remove this setting",
                )
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """Warm up linearly, then stay at the peak."""

    name: str = "constant"
    """name of the schedule"""
    warmup_steps: int | Literal["auto"] = field(default="auto", metadata={"min": 0})
    """steps over which the rate rises linearly to its peak; auto: a fifteenth of the run"""

    def warmup(self, steps: int) -> int:
        """Return the steps of warm-up of a run of so many steps."""
        return steps // 15 if self.warmup_steps == "auto" else self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class CosineConfig(ConstantConfig):
    """Warm up linearly, then fall along half a cosine (Loshchilov and Hutter, 2017)."""

    name: str = "cosine"
    """name of the schedule"""
    final_lr_ratio: float = field(default=0.1, metadata={"min": 0, "max": 1})
    """rate at the last step, as a share of the peak"""


@dataclass(frozen=True, kw_only=True)
class LinearConfig(CosineConfig):
    """Warm up linearly, then fall linearly."""

    name: str = "linear"
    """name of the schedule"""


@dataclass(frozen=True, kw_only=True)
class WSDConfig(ConstantConfig):
    """Warm up, stay, then decay linearly (warmup-stable-decay; Hu et al., MiniCPM, 2024)."""

    name: str = "wsd"
    """name of the schedule"""
    decay_steps: int = field(default=0, metadata={"min": 0})
    """last steps, over which the rate falls linearly; 0: a fifth of the run"""
    final_lr_ratio: float = field(default=0.0, metadata={"min": 0, "max": 1})
    """rate at the last step, as a share of the peak"""


OptimizerConfig = AdamWConfig | SGDConfig
SchedulerConfig = ConstantConfig | CosineConfig | LinearConfig | WSDConfig

OPTIMIZERS: Registry[Any, None] = Registry(
    "optimizer",
    {
        "adamw": Entry(None, "AdamW, decoupled weight decay", AdamWConfig),
        "sgd": Entry(None, "stochastic gradient descent with momentum", SGDConfig),
    },
)
SCHEDULERS: Registry[Any, None] = Registry(
    "scheduler",
    {
        "constant": Entry(None, "warm up linearly, then stay at the peak", ConstantConfig),
        "cosine": Entry(None, "warm up linearly, then fall along half a cosine", CosineConfig),
        "linear": Entry(None, "warm up linearly, then fall linearly", LinearConfig),
        "wsd": Entry(None, "warm up, stay, then decay linearly", WSDConfig),
    },
)
