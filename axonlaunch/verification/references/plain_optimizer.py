"""The reference's optimizers, their options and learning rates in plain torch.

Implemented from the definitions. Shares no code with ``engines``, because it checks their updates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from axonlaunch.config.code.plugins import import_callable
from axonlaunch.config.optimization.optimizer import INCLUDED_OPTIMIZERS, OPTIMIZERS, AdamWConfig
from axonlaunch.config.optimization.schedules import SCHEDULERS, ConstantConfig
from axonlaunch.config.values.optional_keys import (
    custom_arguments,
    custom_target,
    optimizer_groups,
)
from axonlaunch.models.specs.model_spec import ModelSpec

PEAK = "initial_lr"
_NOT_OPTIONS = {"name", "groups", "master_weights", "state_dtype", "target", "arguments"}
_CLASSES: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}


class PlainMuon(torch.optim.Muon):
    """torch's Muon; for a parameter [experts, m, n], of the matrix of each expert."""

    def __init__(self, params: Sequence[dict[str, Any]]) -> None:
        super().__init__([{**g, "params": [p for p in g["params"] if p.ndim == 2]} for g in params])
        for group, given in zip(self.param_groups, params, strict=True):
            group["params"] = given["params"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [
            {**group, "params": [matrix for p in group["params"] for matrix in self._matrices(p)]}
            for group in groups
        ]
        super().step()  # type: ignore[no-untyped-call]
        self.param_groups = groups
        parameters = {p for group in groups for p in group["params"]}
        for matrix in [p for p in self.state if p not in parameters]:
            del self.state[matrix]

    def _matrices(self, p: Tensor) -> list[Tensor]:
        """Return a matrix, or the matrices of a stack with their gradients and momentum."""
        if p.ndim == 2 or p.grad is None:
            return [p]
        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        matrices: list[Tensor] = [nn.Parameter(matrix) for matrix in p.detach()]
        for matrix, gradient, buffer in zip(matrices, p.grad, momentum, strict=True):
            matrix.grad = gradient
            self.state[matrix]["momentum_buffer"] = buffer
        return matrices


class PlainLion(Optimizer):
    """Lion (Chen et al., 2023, algorithm 2), one parameter after another."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            early, late = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                c = early * momentum + (1 - early) * p.grad
                direction = c / (c.abs() + group["eps"]) if group["eps"] else c.sign()
                p -= group["lr"] * (direction + group["weight_decay"] * p)
                momentum.copy_(late * momentum + (1 - late) * p.grad)


def plain_rate(schedule: Any, step: int, *, peak: float, steps: int) -> float:
    """Return the learning rate of a step by the schedule's formula.

    Args:
        schedule: Configuration of the schedule.
        step: Index of the step, from 0.
        peak: Largest learning rate.
        steps: Number of steps of the complete run.
    """
    is_included = isinstance(schedule, ConstantConfig)
    if not is_included:
        if custom_target(schedule) is None:
            return float(peak * SCHEDULERS.get(schedule.name)(schedule)(step, steps))
        function = import_callable("scheduler.target", schedule.target)
        return float(peak * function(step, steps, **schedule.arguments))
    warmup = schedule.warmup_steps
    if warmup == "auto":
        ratio = schedule.warmup_ratio
        warmup = steps // 15 if ratio is None else round(steps * ratio)
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        return float(peak * (1 + (step - warmup) / (warmup or 10_000)) ** -0.5)
    final = schedule.final_lr_ratio
    if schedule.name == "wsd":
        share = schedule.decay_ratio
        decay = schedule.decay_steps
        decay = decay or max(1, steps // 5 if share is None else round(steps * share))
        left = min(1.0, (steps - 1 - step) / decay)
        return float(peak * (final + (1 - final) * left))
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    share = 1 - done if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return float(peak * (final + (1 - final) * share))


def plain_optimizers(
    config: Any, spec: ModelSpec, model: nn.Module, parameters: Mapping[str, Tensor]
) -> list[Optimizer]:
    """Build one optimizer for each optimizer class, with a group for each parameter.

    Args:
        config: Configuration of the optimizer.
        spec: Specification of the model, which determines the hidden matrices.
        model: Full model.
        parameters: Tensors to update, by name.
    """
    blocks = tuple(f"{name}." for name in spec.blocks(model))
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    experts = set(spec.experts(model))
    by_class: dict[Any, list[dict[str, Any]]] = {}
    for name, parameter in model.named_parameters():
        if name not in parameters:
            continue
        is_matrix = parameter.ndim == (3 if name.rpartition(".")[0] in experts else 2)
        is_hidden = is_matrix and name.startswith(blocks) and id(parameter) not in tables
        make, options = _class_and_options(config, name, parameter.ndim, is_hidden=is_hidden)
        group = {"params": [parameters[name]], **options, PEAK: options["lr"]}
        by_class.setdefault(make, []).append(group)
    return [_make_optimizer(make, groups) for make, groups in by_class.items()]


def _make_optimizer(make: Any, groups: list[dict[str, Any]]) -> Optimizer:
    optimizer: Optimizer = make(groups)
    return optimizer


def _class_and_options(
    config: Any, name: str, ndim: int, *, is_hidden: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer class of a parameter and its options.

    Weight decay applies to matrices but not to vectors. Groups of the configuration override this.
    """
    group_options: dict[str, Any] = {}
    for pattern, options in optimizer_groups(config).items():
        if fnmatchcase(name, pattern):
            group_options |= options
    scale = group_options.pop("lr_scale", 1.0)
    if config.name == "muon":
        algorithm = group_options.pop("algorithm", config.algorithm)
        if algorithm == "adamw" or (algorithm == "auto" and not is_hidden):
            peak = config.lr if config.adamw_lr is None else config.adamw_lr
            config = AdamWConfig(
                lr=group_options.pop("lr", peak),
                weight_decay=config.weight_decay,
                betas=config.adamw_betas,
                eps=config.adamw_eps,
            )
            group_options = {
                key: value for key, value in group_options.items() if key == "weight_decay"
            }
    options = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _NOT_OPTIONS and not field.metadata.get("not_an_argument")
    }
    options |= custom_arguments(config)
    if "weight_decay" in options and ndim < 2:
        options["weight_decay"] = 0.0
    options |= group_options
    options["lr"] *= scale
    return class_of(config), options


def class_of(config: Any) -> Any:
    """Return the optimizer class or factory, which is called with groups of parameters."""
    if config.name in ("lion", "muon"):
        return PlainLion if config.name == "lion" else PlainMuon
    if config.name in INCLUDED_OPTIMIZERS:
        return _CLASSES[config.name]
    if (target := custom_target(config)) is not None:
        return import_callable("optimizer.target", target)
    return OPTIMIZERS.get(config.name)  # a torch.optim.Optimizer registered by a plug-in


def clip(parameters: Sequence[Tensor], max_norm: float | None) -> float:
    """Clip gradients like ``clip_grad_norm_`` and return the norm before clipping.

    The norm is summed in fp64, because the fp32 sum of ``clip_grad_norm_`` is too small for large
    tensors.
    """
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=False)
    return float(norm)
