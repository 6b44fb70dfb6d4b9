"""Creates optimizers from their configurations, and the states of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer

from axonlaunch.comm.mesh import local_part
from axonlaunch.config.code.plugins import import_callable
from axonlaunch.config.optimization.optimizer import (
    OPTIMIZERS,
    CustomOptimizerConfig,
)
from axonlaunch.config.optimization.optimizer_states import OptimizerState, ParameterFacts
from axonlaunch.config.optimization.parameter_groups import options_of, with_options
from axonlaunch.config.values.optional_keys import custom_target
from axonlaunch.models.tensors.dtensor_regions import dtensor_of
from axonlaunch.models.tensors.page_locked import page_locked

PEAK_LR = "initial_lr"
"""Group option with the peak learning rate, named as in torch's schedulers."""


def facts_of(tensors: Mapping[str, Tensor]) -> dict[str, ParameterFacts]:
    """Return the facts known about tensors without their model: names and global shapes."""
    return {
        name: ParameterFacts(name=name, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def build_optimizers(configs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Optimizer]:
    """Create one optimizer per class, with one parameter group per set of options.

    Args:
        configs: Configuration by parameter name, see ``chosen_options``.
        tensors: Tensors to update, by the same names.
    """
    by_optimizer = names_in_groups({name: configs[name] for name in tensors})
    return [
        _build([(configs[names[0]], [tensors[name] for name in names]) for names in groups])
        for groups in by_optimizer
    ]


def names_in_groups(configs: Mapping[str, Any]) -> list[list[list[str]]]:
    """Return the parameters of each group of each optimizer, in the order of their update.

    Args:
        configs: Configuration by parameter name, see ``chosen_options``.
    """
    by_class: dict[Any, dict[str, list[str]]] = {}
    for name, config in configs.items():
        groups = by_class.setdefault((config.name, custom_target(config)), {})
        groups.setdefault(repr(options_of(config)), []).append(name)
    return [[*groups.values()] for groups in by_class.values()]


def _build(groups: list[tuple[Any, list[Tensor]]]) -> Optimizer:
    """Create an optimizer from groups of tensors with the same optimizer class."""
    config, _ = groups[0]
    options = [
        {"params": tensors, **options_of(group), PEAK_LR: group.lr} for group, tensors in groups
    ]
    fixed = OPTIMIZERS.facts(config.name).fixed
    optimizer: Optimizer = optimizer_class(config)(options, **options_of(config), **fixed)
    return optimizer


def optimizer_class(config: Any) -> Callable[..., Optimizer]:
    """Return the function that creates an optimizer from parameter groups and options.

    Raises:
        ConfigError: A custom optimizer cannot be imported or does not accept its arguments.
    """
    if not isinstance(config, CustomOptimizerConfig):
        return cast("Callable[..., Optimizer]", OPTIMIZERS.get(config.name))
    return import_callable(
        "optimizer.target", config.target, config.arguments, passed=1, extra_keywords=("lr",)
    )


def chosen_options(config: Any, parameters: Mapping[str, ParameterFacts]) -> dict[str, Any]:
    """Return the optimizer configuration of each parameter, by the same names."""
    return {name: with_options(config, facts) for name, facts in parameters.items()}


def new_state(
    state: OptimizerState,
    parameter: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Allocate the state that an optimizer would create for a parameter in its first step.

    A real step with ``lr=0`` would not be equivalent: SGD adds ``weight_decay * parameter`` to the
    gradient before it fills the momentum, so the momentum would start with the decay of weights
    that may be replaced later.

    AdamW starts with zeros. SGD has no momentum before its first step, in which it uses the
    gradient: ``buffer = gradient``. Zeros give the same result, ``0 * momentum + (1 - dampening) *
    gradient``, because dampening is always 0 here.

    Args:
        state: Description of the state.
        parameter: A full tensor, or a DTensor; for a DTensor the state of this rank's part is
            returned.
        device: Device of states that are stored with the parameter.
        dtype: Type of the updated tensor; None for the type of the parameter.
    """
    local = local_part(parameter.detach())
    if state.on_host:
        device = torch.device("cpu")
    dtype = _dtype(state, dtype or local.dtype)
    full = state.shape(tuple(parameter.shape))
    assert full is not None
    dims = state.kept_dims(parameter.ndim)
    if state.is_packed:
        packed = state.shape(tuple(local.shape))
        assert packed is not None
        shape = packed
    elif len(full) == parameter.ndim:
        shape = tuple(local.shape[dim] if dim in dims else full[dim] for dim in range(local.ndim))
    else:
        shape = full
    # Memory that is copied to a device in every update is page-locked, as in ``offload``.
    is_copied = local.is_cuda and device.type == "cpu" and not state.on_host
    state_device = torch.device("meta") if is_copied else device
    if shape == local.shape:  # same strides as the parameter
        state_tensor = torch.empty_like(local, dtype=dtype, device=state_device)
    else:
        state_tensor = torch.empty(shape, dtype=dtype, device=state_device)
    return (page_locked(state_tensor) if is_copied else state_tensor).fill_(state.initial or 0)


def _dtype(state: OptimizerState, parameter_dtype: torch.dtype) -> torch.dtype:
    numbers = {"parameter": parameter_dtype, "int": torch.int64, "float": torch.float64}
    dtype = numbers.get(state.dtype) or getattr(torch, state.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def as_sharded(state: OptimizerState, local: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a state as a DTensor that is sharded like its parameter.

    Dims that the state does not have are replicated: for a matrix sharded by rows, row means [m, 1]
    are sharded like its rows, column means [1, n] are not.
    """
    if not isinstance(parameter, DTensor):
        return local
    if state.is_packed:
        packed = state.shape(tuple(parameter.shape))
        assert packed is not None
        stride = torch.empty(packed, device="meta").stride()
        mesh, placements = parameter.device_mesh, parameter.placements
        return dtensor_of(local, mesh, placements, shape=packed, stride=stride)
    if local.ndim != parameter.ndim:
        return local
    if not local.ndim and state.dtype != "parameter":  # step counter
        return local
    dims = state.kept_dims(parameter.ndim)
    full = state.shape(tuple(parameter.shape))
    assert full is not None
    kept: list[Placement] = [
        placement if getattr(placement, "dim", None) in dims else Replicate()
        for placement in parameter.placements
    ]
    stride = torch.empty(full, device="meta").stride()
    if full == parameter.shape:
        stride = parameter.stride()
    return dtensor_of(local, parameter.device_mesh, kept, shape=full, stride=stride)
