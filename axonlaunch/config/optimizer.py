"""Typed configurations of optimizers and learning-rate schedules.

It holds values; ``axonlaunch.engines.optimizer.optimizers`` carries them out.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config import optimizer_states as states
from axonlaunch.config.errors import target_problems
from axonlaunch.config.optimizer_states import OptimizerFacts, ParameterFacts
from axonlaunch.config.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What a group of parameters may set beside its optimizer's own options."""

    lr_scale: float = field(default=1.0, metadata={"min": 0})
    """multiple of the learning rate that the group would have"""


@dataclass(frozen=True, kw_only=True)
class GroupedOptimizer:
    """What every optimizer here has."""

    groups: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"groups": GroupOptions}
    )
    """pattern of parameters' names to the options that those parameters have in place of the
    optimizer's own: any option, and lr_scale; where patterns overlap, the later one's value counts
    """
    state_dtype: Literal["parameter", "fp32"] = field(
        default="parameter", metadata={"of_all_groups": True}
    )
    """type of the states that have an element for each of a parameter's, and of the update.
    parameter: the weights' own (train.param_dtype); fp32: fp32, also of weights in bf16
    """


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(GroupedOptimizer):
    """AdamW (Loshchilov and Hutter, 2019), torch's fused kernel."""

    name: str = "adamw"
    """name of the optimizer"""
    lr: float = field(default=3e-3, metadata={"min": 0})
    """peak learning rate"""
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    """decoupled decay of matrices; vectors (biases, norms) are not decayed"""
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"min": 0, "below": 1})
    """decay of the first and second moment's running averages"""
    eps: float = field(default=1e-8, metadata={"above": 0})
    """added to the denominator"""


@dataclass(frozen=True, kw_only=True)
class AdamConfig(AdamWConfig):
    """Adam (Kingma and Ba, 2015), torch's fused kernel."""

    name: str = "adam"
    """name of the optimizer"""
    weight_decay: float = field(default=0.0, metadata={"min": 0})
    """L2 penalty on matrices; vectors (biases, norms) have none"""
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"min": 0, "below": 1})
    """decay of the first and second moment's running averages"""


@dataclass(frozen=True, kw_only=True)
class NAdamConfig(AdamWConfig):
    """NAdam, Adam with Nesterov momentum (Dozat, 2016), torch's foreach implementation."""

    name: str = "nadam"
    """name of the optimizer"""
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    """decay of matrices; vectors (biases, norms) are not decayed"""
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"min": 0, "below": 1})
    """decay of the first and second moment's running averages"""
    momentum_decay: float = field(default=4e-3, metadata={"min": 0})
    """how fast the momentum warms up to its full value"""
    decoupled_weight_decay: bool = True
    """decay the weights themselves, as AdamW does; false: add an L2 penalty to the gradient"""


@dataclass(frozen=True, kw_only=True)
class LionConfig(GroupedOptimizer):
    """Lion, the sign of a momentum (Chen et al., 2023): half of AdamW's states."""

    name: str = "lion"
    """name of the optimizer"""
    lr: float = field(default=1e-4, metadata={"min": 0})
    """peak learning rate; a third to a tenth of AdamW's"""
    weight_decay: float = field(default=1.0, metadata={"min": 0})
    """decoupled decay of matrices, three to ten times AdamW's; vectors are not decayed"""
    betas: tuple[float, float] = field(default=(0.9, 0.99), metadata={"min": 0, "below": 1})
    """share of the momentum in the update, and of the last momentum in the next"""
    eps: float = field(default=0.0, metadata={"min": 0})
    """0: the update is the sign of c; above 0 it is c / (abs(c) + eps), which is smooth around 0"""


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(GroupedOptimizer):
    """Adafactor (Shazeer and Stern, 2018): of a matrix it keeps a row and a column, torch's own."""

    name: str = "adafactor"
    """name of the optimizer"""
    lr: float = field(default=1e-2, metadata={"min": 0})
    """peak of the relative step size"""
    weight_decay: float = field(default=0.0, metadata={"min": 0})
    """decoupled decay of matrices; vectors (biases, norms) are not decayed"""
    beta2_decay: float = field(default=-0.8, metadata={"max": 0})
    """exponent of the step by which the average of squares forgets"""
    eps: tuple[float | None, float] = field(default=(None, 1e-3), metadata={"min": 0})
    """least root of the squares' estimate, null: the dtype's precision; least size of a parameter
    that a step is relative to
    """
    d: float = field(default=1.0, metadata={"min": 1})
    """largest root mean square of an update, beside its step size"""


@dataclass(frozen=True, kw_only=True)
class MuonConfig(GroupedOptimizer):
    """Muon for hidden matrices (Jordan et al., 2024), torch's own, and AdamW for the others."""

    name: str = "muon"
    """name of the optimizer"""
    lr: float = field(default=3e-3, metadata={"min": 0})
    """peak learning rate"""
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    """decoupled decay of matrices; vectors (biases, norms) are not decayed"""
    algorithm: Literal["auto", "muon", "adamw"] = field(
        default="auto", metadata={"not_an_argument": True}
    )
    """auto: Muon for the matrices of the model's repeated blocks, AdamW for everything else
    (embeddings, the head, norms, biases), as Muon's authors prescribe; for a group of parameters
    either can be chosen
    """
    momentum: float = field(default=0.95, metadata={"min": 0, "below": 1})
    """share of the last momentum that is kept"""
    nesterov: bool = True
    """look ahead along the momentum"""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """of the Newton-Schulz polynomial"""
    ns_steps: int = field(default=5, metadata={"min": 1, "below": 100})
    """iterations of it"""
    eps: float = field(default=1e-7, metadata={"above": 0})
    """least norm that a matrix is divided by"""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """match_rms_adamw: updates are as large as AdamW's, whose learning rate and decay then serve
    for both (Liu et al., 2025); original: lr times the root of max(1, rows / columns), with an lr
    of about 0.02, and adamw_lr of its own
    """
    adamw_lr: float | None = field(default=None, metadata={"min": 0, "not_an_argument": True})
    """peak learning rate of what AdamW updates; null: lr"""
    adamw_betas: tuple[float, float] = field(
        default=(0.9, 0.95), metadata={"min": 0, "below": 1, "not_an_argument": True}
    )
    """AdamW's betas"""
    adamw_eps: float = field(default=1e-8, metadata={"above": 0, "not_an_argument": True})
    """AdamW's eps"""

    def for_parameter(self, parameter: ParameterFacts, overridden: Container[str]) -> Any:
        """Return the configuration of what updates a parameter: this one, or AdamW's.

        Args:
            parameter: Which.
            overridden: Options that a group sets for it; its ``lr`` counts for both.
        """
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = "muon" if parameter.is_hidden_matrix else "adamw"
        if algorithm == "muon":
            return self
        own = self.adamw_lr if self.adamw_lr is not None and "lr" not in overridden else self.lr
        return AdamWConfig(
            lr=own, weight_decay=self.weight_decay, betas=self.adamw_betas, eps=self.adamw_eps
        )


@dataclass(frozen=True, kw_only=True)
class SGDConfig(GroupedOptimizer):
    """Stochastic gradient descent with momentum, torch's fused kernel."""

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
class FreeOptimizerConfig(GroupedOptimizer):
    """Configuration of a registered optimizer that brought no dataclass of its own."""

    name: str
    """name in the registry of optimizers"""
    lr: float = field(default=1e-3, metadata={"min": 0})
    """peak learning rate"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the class; weight_decay among them is that of matrices"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        if "lr" in self.arguments:
            return [("arguments", "lr is not among them; write optimizer.lr=... instead")]
        return []


@dataclass(frozen=True, kw_only=True)
class CustomOptimizerConfig(FreeOptimizerConfig):
    """A user's own optimizer, named by where it is imported from."""

    name: str = "custom"
    """name in the registry of optimizers"""
    target: str
    """its class, package.module:Class; called with groups of parameters, lr and the arguments"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        return [*target_problems(self.target, "Class"), *super().problems()]


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """Warm up linearly, then stay at the peak."""

    name: str = "constant"
    """name of the schedule"""
    warmup_steps: int | Literal["auto"] = field(default="auto", metadata={"min": 0})
    """steps over which the rate rises linearly to its peak; auto: as warmup_ratio says"""
    warmup_ratio: float | None = field(default=None, metadata={"min": 0, "below": 1})
    """share of the run over which the rate rises, in place of warmup_steps; null: a fifteenth"""

    def warmup(self, steps: int) -> int:
        """Return the steps of warm-up of a run of so many steps."""
        if self.warmup_steps != "auto":
            return self.warmup_steps
        return steps // 15 if self.warmup_ratio is None else round(steps * self.warmup_ratio)

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        if self.warmup_ratio is None or self.warmup_steps == "auto":
            return []
        return [("warmup_ratio", "scheduler.warmup_steps is set too; use one of them")]


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


OptimizerConfig = (
    AdamWConfig
    | SGDConfig
    | LionConfig
    | AdafactorConfig
    | MuonConfig
    | CustomOptimizerConfig
    | FreeOptimizerConfig
)
SchedulerConfig = ConstantConfig | CosineConfig | LinearConfig | WSDConfig

_OURS = "axonlaunch.engines.optimizer"
OPTIMIZERS: Registry[Any, OptimizerFacts] = Registry(
    "optimizer",
    {
        "adamw": Entry("torch.optim:AdamW", "AdamW, fused", AdamWConfig, states.ADAM),
        "adam": Entry("torch.optim:Adam", "Adam, fused", AdamConfig, states.ADAM),
        "sgd": Entry(
            "torch.optim:SGD", "stochastic gradient descent, fused", SGDConfig, states.SGD
        ),
        "nadam": Entry(
            "torch.optim:NAdam", "Adam with Nesterov momentum", NAdamConfig, states.NADAM
        ),
        "lion": Entry(f"{_OURS}.lion:Lion", "sign of a momentum", LionConfig, states.LION),
        "adafactor": Entry(
            f"{_OURS}.adafactor:ShardedAdafactor",
            "a row and a column of second moments",
            AdafactorConfig,
            states.ADAFACTOR,
        ),
        "muon": Entry(
            f"{_OURS}.muon:ShardedMuon",
            "Muon for hidden matrices, AdamW for the others",
            MuonConfig,
            states.MUON,
        ),
        "custom": Entry(
            None, "your own class, optimizer.target", CustomOptimizerConfig, OptimizerFacts()
        ),
    },
    entry_points="axonlaunch.optimizers",
    free_config=FreeOptimizerConfig,
)
"""Optimizers by name. A target is called with groups of parameters, each a dict of ``params`` and
its options, and with the options of the optimizer itself as keywords."""
OWN_OPTIMIZERS = frozenset(OPTIMIZERS.configs()) - {"custom"}
"""Those whose states are written here, and held against their classes by tests."""
SCHEDULERS: Registry[Any, None] = Registry(
    "scheduler",
    {
        "constant": Entry(None, "warm up linearly, then stay at the peak", ConstantConfig),
        "cosine": Entry(None, "warm up linearly, then fall along half a cosine", CosineConfig),
        "linear": Entry(None, "warm up linearly, then fall linearly", LinearConfig),
        "wsd": Entry(None, "warm up, stay, then decay linearly", WSDConfig),
    },
)
