"""Typed configurations of learning-rate schedules.

``axonlaunch.engines.optimizer.schedules`` computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.problems.errors import target_problems
from axonlaunch.config.registry import Entry, RegisteredConfig, Registry


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """Linear warm-up, then the peak learning rate."""

    name: str = "constant"
    """name of the schedule"""
    warmup_steps: int | Literal["auto"] = field(default="auto", metadata={"min": 0})
    """number of steps in which the learning rate rises linearly to its peak; auto: set by
    warmup_ratio
    """
    warmup_ratio: float | None = field(default=None, metadata={"min": 0, "below": 1})
    """warm-up steps as a fraction of all steps, instead of warmup_steps; null: 1/15"""

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps of a run with ``steps`` steps."""
        if self.warmup_steps != "auto":
            return self.warmup_steps
        return steps // 15 if self.warmup_ratio is None else round(steps * self.warmup_ratio)

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        if self.warmup_ratio is None or self.warmup_steps == "auto":
            return []
        return [("warmup_ratio", "scheduler.warmup_steps is set too; use one of them")]


@dataclass(frozen=True, kw_only=True)
class CosineConfig(ConstantConfig):
    """Linear warm-up, then decay along half a cosine (Loshchilov and Hutter, 2017)."""

    name: str = "cosine"
    """name of the schedule"""
    final_lr_ratio: float = field(default=0.1, metadata={"min": 0, "max": 1})
    """learning rate of the last step as a fraction of the peak"""


@dataclass(frozen=True, kw_only=True)
class LinearConfig(CosineConfig):
    """Linear warm-up, then linear decay."""

    name: str = "linear"
    """name of the schedule"""


@dataclass(frozen=True, kw_only=True)
class WSDConfig(ConstantConfig):
    """Linear warm-up, constant rate, linear decay (warmup-stable-decay, Hu et al., 2024)."""

    name: str = "wsd"
    """name of the schedule"""
    decay_steps: int = field(default=0, metadata={"min": 0})
    """number of steps at the end in which the learning rate falls linearly; 0: set by decay_ratio
    """
    decay_ratio: float | None = field(default=None, metadata={"above": 0, "max": 1})
    """steps of the decay as a fraction of all steps, instead of decay_steps; null: 1/5"""
    final_lr_ratio: float = field(default=0.0, metadata={"min": 0, "max": 1})
    """learning rate of the last step as a fraction of the peak"""

    def decay(self, steps: int) -> int:
        """Return the number of decay steps of a run with ``steps`` steps."""
        if self.decay_steps:
            return self.decay_steps
        return max(1, steps // 5 if self.decay_ratio is None else round(steps * self.decay_ratio))

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        issues = super().problems()
        if self.decay_ratio is not None and self.decay_steps:
            issues.append(("decay_ratio", "scheduler.decay_steps is set too; use one of them"))
        return issues


@dataclass(frozen=True, kw_only=True)
class InverseSqrtConfig(ConstantConfig):
    """Linear warm-up, then the inverse square root of the step (Vaswani et al., 2017)."""

    name: str = "inverse_sqrt"
    """name of the schedule"""

    def timescale(self, steps: int) -> int:
        """Return the number of steps after which the rate is divided by the root of two.

        As in transformers, it is that of the warm-up; without one, 10,000.
        """
        return self.warmup(steps) or 10_000


@dataclass(frozen=True, kw_only=True)
class CustomScheduleConfig(RegisteredConfig):
    """User-defined schedule, named by its import path."""

    name: str = "custom"
    """name of the schedule"""
    target: str
    """import path of the function, package.module:function; it is called with the number of steps
    done, the number of steps of the run and the arguments, and returns the factor of the peak rate
    """

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        return target_problems(self.target, "function")


SchedulerConfig = (
    ConstantConfig
    | CosineConfig
    | LinearConfig
    | WSDConfig
    | InverseSqrtConfig
    | CustomScheduleConfig
    | RegisteredConfig
)

ScheduleMaker = Callable[[Any], Callable[[int, int], float]]
"""Maps options to a function from the steps done and the steps of the run to a factor."""
SCHEDULERS: Registry[ScheduleMaker, None] = Registry(
    "scheduler",
    {
        "constant": Entry(None, "linear warm-up, then the peak rate", ConstantConfig),
        "cosine": Entry(None, "linear warm-up, then half a cosine", CosineConfig),
        "linear": Entry(None, "linear warm-up, then linear decay", LinearConfig),
        "wsd": Entry(None, "linear warm-up, constant rate, linear decay", WSDConfig),
        "inverse_sqrt": Entry(
            None, "linear warm-up, then the inverse square root of the step", InverseSqrtConfig
        ),
        "custom": Entry(None, "your function, scheduler.target", CustomScheduleConfig),
    },
    entry_points="axonlaunch.schedulers",
)
"""Schedules by name; ``engines.optimizer.schedules`` computes those without a target."""
