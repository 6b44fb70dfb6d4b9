"""Typed configurations of optimizers.

``axonlaunch.engines.optimizer.optimizers`` builds the optimizers.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.optimization import optimizer_states as states
from axonlaunch.config.optimization.optimizer_states import OptimizerFacts, ParameterFacts
from axonlaunch.config.precision import MasterFormatName, StateFormatName
from axonlaunch.config.problems.errors import target_problems
from axonlaunch.config.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of a group of parameters, in addition to the options of the optimizer."""

    lr_scale: float = field(default=1.0, metadata={"min": 0})
    """factor by which the learning rate of the group is multiplied"""


@dataclass(frozen=True, kw_only=True)
class GroupedOptimizer:
    """Options that all included optimizers have."""

    groups: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"groups": GroupOptions}
    )
    """options for parameters whose names match a pattern, {PATTERN: {OPTION: value}}: any option of
    the optimizer, and lr_scale; the last matching pattern has priority
    """
    master_weights: MasterFormatName | None = field(default=None, metadata={"of_all_groups": True})
    """dtype of a copy of each weight in 16 bits, which the optimizer updates and checkpoints hold;
    the weight is the rounded copy. It is sharded like optimizer states. null: no copies, the
    optimizer updates the weights, and changes smaller than their rounding are lost
    """
    state_dtype: StateFormatName = field(default="parameter", metadata={"of_all_groups": True})
    """dtype of the states with the shape of the parameter. parameter: the dtype of the updated
    weights or masters; fp32: fp32, even if the weights are bf16; bf16: half the bytes, rounded up
    or down at random after each update, so that small changes are kept on average; 8bit: blocks of
    64 values with codes of 8 bits and a scale, for matrices of at least 4,096 elements. Except with
    parameter the update is computed in fp32
    """

    def for_parameter(self, parameter: ParameterFacts, overridden: Container[str]) -> Any:
        """Return the configuration that updates a parameter: this one, or another optimizer's.

        Args:
            parameter: Facts about the parameter.
            overridden: Options that a group of parameters sets for this parameter.
        """
        del parameter, overridden
        return self


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(GroupedOptimizer):
    """AdamW (Loshchilov and Hutter, 2019), torch's fused kernel."""

    name: str = "adamw"
    """name of the optimizer"""
    lr: float = field(default=3e-3, metadata={"min": 0})
    """peak learning rate"""
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    """decoupled weight decay of matrices; vectors (biases, norms) are not decayed"""
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"min": 0, "below": 1})
    """decay rates of the running averages of the gradient and its square"""
    eps: float = field(default=1e-8, metadata={"above": 0})
    """term added to the denominator of the update"""


@dataclass(frozen=True, kw_only=True)
class AdamConfig(AdamWConfig):
    """Adam (Kingma and Ba, 2015), torch's fused kernel."""

    name: str = "adam"
    """name of the optimizer"""
    weight_decay: float = field(default=0.0, metadata={"min": 0})
    """L2 penalty on matrices, added to the gradient; vectors (biases, norms) have none"""
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"min": 0, "below": 1})
    """decay rates of the running averages of the gradient and its square"""


@dataclass(frozen=True, kw_only=True)
class NAdamConfig(AdamWConfig):
    """NAdam, Adam with Nesterov momentum (Dozat, 2016), torch's foreach implementation."""

    name: str = "nadam"
    """name of the optimizer"""
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    """weight decay of matrices, decoupled unless decoupled_weight_decay is false; vectors (biases,
    norms) are not decayed
    """
    momentum_decay: float = field(default=4e-3, metadata={"min": 0})
    """rate at which the momentum warms up to its full value"""
    decoupled_weight_decay: bool = True
    """true: decay the weights directly, as AdamW does; false: add an L2 penalty to the gradient"""


@dataclass(frozen=True, kw_only=True)
class LionConfig(GroupedOptimizer):
    """Lion, an update by the sign of the momentum (Chen et al., 2023): half of AdamW's states."""

    name: str = "lion"
    """name of the optimizer"""
    lr: float = field(default=3e-4, metadata={"min": 0})
    """peak learning rate, usually 3 to 10 times lower than AdamW's"""
    weight_decay: float = field(default=1.0, metadata={"min": 0})
    """decoupled weight decay of matrices, usually 3 to 10 times AdamW's; vectors (biases, norms)
    are not decayed
    """
    betas: tuple[float, float] = field(default=(0.9, 0.99), metadata={"min": 0, "below": 1})
    """weight of the momentum in the update, and in the next momentum; the gradient has the rest"""
    eps: float = field(default=0.0, metadata={"min": 0})
    """0: the update is sign(c), where c is the weighted sum of momentum and gradient; above 0: the
    update is c / (abs(c) + eps), which is smooth around 0
    """


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(GroupedOptimizer):
    """Adafactor (Shazeer and Stern, 2018), torch's: one row and one column of states per matrix."""

    name: str = "adafactor"
    """name of the optimizer"""
    lr: float = field(default=1e-2, metadata={"min": 0})
    """peak learning rate, relative to the size of the parameter"""
    weight_decay: float = field(default=0.0, metadata={"min": 0})
    """decoupled weight decay of matrices; vectors (biases, norms) are not decayed"""
    beta2_decay: float = field(default=-0.8, metadata={"max": 0})
    """exponent: step ** beta2_decay is the weight of the newest squared gradient in its average"""
    eps: tuple[float | None, float] = field(default=(None, 1e-3), metadata={"min": 0})
    """[eps1, eps2]: lower limit of the root of the squared gradients' estimate (null: the precision
    of the dtype), and lower limit of the size of the parameter that scales the learning rate
    """
    d: float = field(default=1.0, metadata={"min": 1})
    """largest root mean square of an update before it is multiplied by the learning rate"""


@dataclass(frozen=True, kw_only=True)
class MuonConfig(GroupedOptimizer):
    """Muon for hidden matrices (Jordan et al., 2024), torch's; AdamW for all other parameters."""

    name: str = "muon"
    """name of the optimizer"""
    lr: float = field(default=3e-3, metadata={"min": 0})
    """peak learning rate"""
    weight_decay: float = field(default=0.1, metadata={"min": 0})
    """decoupled weight decay of matrices; vectors (biases, norms) are not decayed"""
    algorithm: Literal["auto", "muon", "adamw"] = field(
        default="auto", metadata={"not_an_argument": True}
    )
    """update rule. auto: Muon for the matrices of the model's repeated blocks, AdamW for all other
    parameters (embeddings, the head, norms, biases), as Muon's authors prescribe; muon, adamw: that
    rule, usually for a group of parameters
    """
    momentum: float = field(default=0.95, metadata={"min": 0, "below": 1})
    """fraction of the previous momentum that is kept"""
    nesterov: bool = True
    """use Nesterov momentum"""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """coefficients of the Newton-Schulz polynomial"""
    ns_steps: int = field(default=5, metadata={"min": 1, "below": 100})
    """number of Newton-Schulz iterations"""
    eps: float = field(default=1e-7, metadata={"above": 0})
    """lower limit of the norm by which a matrix is divided"""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """scale of updates. match_rms_adamw: as large as AdamW's, so that lr and weight_decay suit both
    (Liu et al., 2025); original: lr * sqrt(max(1, rows / columns)), with lr about 0.02; set
    adamw_lr too
    """
    adamw_lr: float | None = field(default=None, metadata={"min": 0, "not_an_argument": True})
    """peak learning rate of the parameters that AdamW updates; null: lr"""
    adamw_betas: tuple[float, float] = field(
        default=AdamWConfig.betas, metadata={"min": 0, "below": 1, "not_an_argument": True}
    )
    """betas of AdamW"""
    adamw_eps: float = field(
        default=AdamWConfig.eps, metadata={"above": 0, "not_an_argument": True}
    )
    """eps of AdamW"""

    def for_parameter(self, parameter: ParameterFacts, overridden: Container[str]) -> Any:
        """Return the configuration that updates a parameter: this one, or an AdamW configuration.

        Args:
            parameter: Facts about the parameter.
            overridden: Options that a group of parameters sets for this parameter. An ``lr`` among
                them replaces ``adamw_lr`` too.
        """
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = "muon" if parameter.is_hidden_matrix else "adamw"
        if algorithm == "muon":
            return self
        lr = self.adamw_lr if self.adamw_lr is not None and "lr" not in overridden else self.lr
        return AdamWConfig(
            lr=lr, weight_decay=self.weight_decay, betas=self.adamw_betas, eps=self.adamw_eps
        )


@dataclass(frozen=True, kw_only=True)
class SGDConfig(GroupedOptimizer):
    """Stochastic gradient descent with momentum, torch's fused kernel."""

    name: str = "sgd"
    """name of the optimizer"""
    lr: float = field(default=0.1, metadata={"min": 0})
    """peak learning rate"""
    weight_decay: float = field(default=0.0, metadata={"min": 0})
    """L2 penalty on matrices, added to the gradient; vectors (biases, norms) have none"""
    momentum: float = field(default=0.9, metadata={"min": 0, "below": 1})
    """fraction of the previous update that is kept"""
    nesterov: bool = False
    """use Nesterov momentum"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
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
    """Configuration of an optimizer that was registered without a dataclass."""

    name: str
    """name under which the optimizer is registered"""
    lr: float = field(default=1e-3, metadata={"min": 0})
    """peak learning rate"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the class; a weight_decay among them applies to matrices only"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        if "lr" in self.arguments:
            return [("arguments", "lr is not among them; write optimizer.lr=... instead")]
        return []


@dataclass(frozen=True, kw_only=True)
class CustomOptimizerConfig(FreeOptimizerConfig):
    """User-defined optimizer, named by its import path."""

    name: str = "custom"
    """name of the optimizer"""
    target: str
    """import path of the class, package.module:Class; it is called with groups of parameters, lr
    and the arguments
    """

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        return [*target_problems(self.target, "Class"), *super().problems()]


OptimizerConfig = (
    AdamWConfig
    | SGDConfig
    | LionConfig
    | AdafactorConfig
    | MuonConfig
    | CustomOptimizerConfig
    | FreeOptimizerConfig
)

_OURS = "axonlaunch.engines.optimizer.algorithms"
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
        "lion": Entry(f"{_OURS}.lion:Lion", "sign of the momentum", LionConfig, states.LION),
        "adafactor": Entry(
            f"{_OURS}.adafactor:ShardedAdafactor",
            "one row and one column of second moments per matrix",
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
            None, "your class, optimizer.target", CustomOptimizerConfig, OptimizerFacts()
        ),
    },
    entry_points="axonlaunch.optimizers",
    free_config=FreeOptimizerConfig,
)
"""Optimizers by name.

A target is called with groups of parameters (each a dict of ``params`` and the group's options) and
with the options of the optimizer as keyword arguments.
"""
INCLUDED_OPTIMIZERS = frozenset(OPTIMIZERS.configs()) - {"custom"}
"""Included optimizers. Their states are declared here, and tests compare them with the classes."""
