"""Determines an optimizer's states and sharding by running it on small parameters.

It is used for optimizers without a description. The optimizer updates parameters of a few elements
in this process, and the results are compared. States that a checkpoint cannot save are refused.
Parameters of a run are not used.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.optimization.optimizer import OPTIMIZERS, CustomOptimizerConfig
from axonlaunch.config.optimization.optimizer_states import OptimizerState, Shape, Sharding
from axonlaunch.config.optimization.parameter_groups import options_of
from axonlaunch.engines.optimizer.optimizers import optimizer_class
from axonlaunch.engines.optimizer.quantized_states import (
    FixedShape,
    UnsavableStateError,
    depends_on_blocks,
    large_shape,
    states_of_shape,
)
from axonlaunch.models.fake.fake_tensor_cache import with_tensor_values

_SIZES = ((6, 4, 8, 10, 12), (10, 8, 4, 6, 14))
"""Dims of the two test parameters: even, to split them in halves, and all different within one."""
_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Probe:
    """Properties of an optimizer.

    Attributes:
        states: States of a small parameter with the tested number of dims.
        sharding: ``elementwise`` if updating two halves gives the same as updating the whole, and
            no states of a large parameter belong to blocks of its elements.
        defaults: Options that a parameter group can set.
        begins_with_states: Whether states exist before the first step.
    """

    states: tuple[OptimizerState, ...]
    sharding: Sharding
    defaults: frozenset[str]
    begins_with_states: bool


def probe(config: Any, ndim: int) -> Probe:
    """Run an optimizer on test parameters with ``ndim`` dims.

    Args:
        config: Optimizer configuration, as returned by ``with_options``.
        ndim: Number of dims of the parameters.

    Raises:
        ConfigError: The optimizer cannot be imported or called, fails, or has states that cannot be
            saved.
    """
    return _probe(_Call(optimizer_class(config), repr(options_of(config)), config), ndim)


def probe_states(config: Any, shape: Shape) -> tuple[OptimizerState, ...]:
    """Find the states that an optimizer keeps of a parameter of a shape.

    Args:
        config: Optimizer configuration, as returned by ``with_options``.
        shape: Shape of the full parameter.

    Raises:
        ConfigError: See ``probe``.
    """
    return _probe_states(_Call(optimizer_class(config), repr(options_of(config)), config), shape)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A configuration that compares equal to others that create the same optimizer."""

    made_by: Callable[..., Optimizer]
    options: str
    config: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, str]:
        return self.made_by, self.options


@functools.cache
def _probe(call: _Call, ndim: int) -> Probe:
    config = call.config
    shapes = [sizes[:ndim] for sizes in _SIZES]
    with _trying(config):
        tried = [_try_update(config, _tensors(shape)) for shape in shapes]
        is_elementwise = all(_is_same_by_halves(config, shapes[0], dim) for dim in range(ndim))
        in_fp32 = _always_fp32(config, shapes[0])
        begins_with_states = bool(_make(config, nn.Parameter(torch.zeros(shapes[0]))).state)
    (first, optimizer), (second, _) = tried
    states = tuple(
        dataclasses.replace(state, dtype="float32") if state.name in in_fp32 else state
        for state in _states(config, shapes, first, second)
    )
    is_elementwise &= not depends_on_blocks(_at_shape(config, large_shape(ndim), states))
    sharding: Sharding = "elementwise" if is_elementwise else "whole"
    return Probe(states, sharding, frozenset(optimizer.defaults), begins_with_states)


@functools.cache
def _probe_states(call: _Call, shape: Shape) -> tuple[OptimizerState, ...]:
    return tuple(_at_shape(call.config, shape, _probe(call, len(shape)).states))


def _at_shape(
    config: Any, shape: Shape, small: tuple[OptimizerState, ...]
) -> Iterator[OptimizerState]:
    """Yield the states of a parameter of a shape, given those of small ones."""

    def keeps(tried: Shape) -> dict[str, Any]:
        return _try_update(config, _tensors(tried, steps=1))[0]

    with _trying(config):
        try:
            states = [*states_of_shape(keeps, shape, {state.name: state for state in small})]
        except UnsavableStateError as error:
            raise _refusal(config, str(error)) from None
    yield from states


@contextmanager
def _trying(config: Any) -> Iterator[None]:
    """Surround updates of parameters made for trying an optimizer.

    An estimate may try one, where tensors have no values to compare.

    Raises:
        ConfigError: An update failed.
    """
    with with_tensor_values(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # user code may raise any exception
            key, value = _chosen_by(config)
            what = "trying it on a small parameter"
            raise ConfigError([ConfigIssue.of_failure(key, what, error, value)]) from error


def _refusal(config: Any, message: str) -> ConfigError:
    key, value = _chosen_by(config)
    return ConfigError([ConfigIssue(key, message, value)])


def _chosen_by(config: Any) -> tuple[str, str]:
    """Return the configuration key that selected the optimizer, and its value."""
    if isinstance(config, CustomOptimizerConfig):
        return "optimizer.target", config.target
    return "optimizer.name", config.name


def _tensors(shape: Shape, *, steps: int = _STEPS) -> list[Tensor]:
    """Return a parameter and its gradients for every step."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(1 + steps)]


def _try_update(config: Any, tensors: list[Tensor]) -> tuple[dict[str, Any], Optimizer]:
    """Update a parameter; return its states and the optimizer.

    Raises:
        ConfigError: The optimizer stores changing values in its parameter groups.
    """
    start, *gradients = tensors
    parameter = nn.Parameter(start.clone())
    optimizer = _make(config, parameter)
    previous_options = _options(optimizer)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    if changed := sorted(
        key for key, value in _options(optimizer).items() if previous_options.get(key) != value
    ):
        raise _refusal(
            config,
            f"keeps {', '.join(changed)} in its groups of parameters, which a checkpoint does not "
            "save; keep it in self.state[parameter]",
        )
    start.copy_(parameter.detach())
    return dict(optimizer.state.get(parameter, {})), optimizer


def _make(config: Any, parameter: nn.Parameter) -> Optimizer:
    make: Callable[..., Any] = optimizer_class(config)
    options, fixed = options_of(config), OPTIMIZERS.facts(config.name).fixed
    optimizer = make([{"params": [parameter], **options}], **copy.deepcopy(options), **fixed)
    if not isinstance(optimizer, Optimizer):
        raise _refusal(config, f"makes {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def _options(optimizer: Optimizer) -> dict[str, str]:
    [group] = optimizer.param_groups
    return {key: repr(value) for key, value in group.items() if key != "params"}


def _is_same_by_halves(config: Any, shape: Shape, dim: int) -> bool:
    """Return whether updating both halves separately gives the same as updating the parameter."""
    full, halves = _tensors(shape), [_tensors(shape) for _ in range(2)]
    _try_update(config, full)
    updated = []
    for half_index, tensors in enumerate(halves):
        half = [tensor.chunk(2, dim)[half_index].clone() for tensor in tensors]
        _try_update(config, half)
        updated.append(half[0])
    return torch.allclose(torch.cat(updated, dim), full[0], rtol=1e-5, atol=1e-6)


def _always_fp32(config: Any, shape: Shape) -> set[str]:
    """Return the states that are fp32 even if the parameter is bf16."""
    try:
        kept, _ = _try_update(config, [tensor.bfloat16() for tensor in _tensors(shape, steps=1)])
    except Exception:  # a class that does not update bf16 parameters keeps nothing of them
        return set()
    return {name for name, value in kept.items() if getattr(value, "dtype", None) is torch.float32}


def _states(
    config: Any, shapes: list[Shape], first: dict[str, Any], second: dict[str, Any]
) -> Iterator[OptimizerState]:
    """Yield the states, derived from those of two parameters of different sizes.

    Raises:
        ConfigError: A state is neither a tensor nor a number, or its size does not follow from the
            parameter's.
    """
    for name, value in first.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Tensor | int | float):
            message = f"keeps a state {name} that is a {type(value).__name__}; keep a tensor"
            raise _refusal(config, message)
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            yield OptimizerState(name=name, shape=FixedShape(()), dtype=kind, initial=None)
            continue
        other = second.get(name)
        sizes = (tuple(value.shape), tuple(other.shape) if isinstance(other, Tensor) else ())
        rule = _rule(shapes, sizes)
        if rule is None:
            raise _refusal(
                config,
                f"keeps a state {name} of shape {list(value.shape)} of a parameter of shape "
                f"{list(shapes[0])}; each dim must be the parameter's or 1",
            )
        is_like = value.ndim and value.dtype is torch.float32
        dtype = "parameter" if is_like else str(value.dtype).removeprefix("torch.")
        yield OptimizerState(name=name, shape=rule, dtype=dtype, initial=None)


def _rule(shapes: list[Shape], sizes: tuple[Shape, Shape]) -> Callable[[Shape], Shape] | None:
    """Return a function from a parameter's shape to its state's; None if the shapes do not fit."""
    first, second = sizes
    if first == second and math.prod(first) == 1:
        return FixedShape(first)
    if any(len(size) != len(shape) for size, shape in zip(sizes, shapes, strict=True)):
        return None
    pairs = [*zip(*sizes, *shapes, strict=True)]
    if not all((a, b) in ((c, d), (1, 1)) for a, b, c, d in pairs):
        return None
    same = [a == c for a, _, c, _ in pairs]

    def rule(shape: Shape) -> Shape:
        return tuple(size if keeps else 1 for size, keeps in zip(shape, same, strict=True))

    return rule
