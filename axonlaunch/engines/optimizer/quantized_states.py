"""Finds the states that an optimizer keeps of a parameter of a given shape, by one update of it.

Optimizers that quantize their states do so for large parameters only, and keep scales of blocks of
elements and tables of codes in addition. What the small parameters of ``probe`` show holds for
small parameters. States that are tensor subclasses are refused, as a checkpoint saves plain ones.

An example, bitsandbytes' ``AdamW8bit`` of a parameter of shape (128, 64): ``state1`` is uint8 of
shape (128, 64) with ``absmax1`` of shape (32,) and ``qmap1`` of shape (256,); of shape (6, 4) it is
fp32, without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from axonlaunch.config.optimization.optimizer_states import OptimizerState, Shape, like_parameter

_ENOUGH = 1 << 16
"""Elements that a parameter is tried with, or a few more: it is quantized as larger ones are."""
_BLOCKS = 1 << 13
"""A multiple of the elements of a block."""
Keeps = Callable[[Shape], Mapping[str, Any]]
"""A parameter's shape to the states that an update of it leaves."""


class UnsavableStateError(ValueError):
    """A state can't be saved."""


@dataclass(frozen=True)
class FixedShape:
    """The shape of a state that does not follow from the dims of its parameter."""

    shape: Shape

    def __call__(self, parameter: Shape) -> Shape:
        """Return the fixed shape."""
        del parameter
        return self.shape


def states_of_shape(
    keeps: Keeps, shape: Shape, small_states: Mapping[str, OptimizerState]
) -> Iterator[OptimizerState]:
    """Yield the states that are kept of a parameter of this shape.

    Args:
        keeps: Updates a parameter of a shape and returns its states.
        shape: The whole parameter's.
        small_states: The states of small parameters, by name.

    Raises:
        UnsavableStateError: A state is no plain tensor and no number, or its size is irregular.
    """
    tried, rows = _representative(shape)
    kept = keeps(tried)
    grown = keeps((tried[0] + rows, *tried[1:])) if rows else kept
    times = (shape[0] - tried[0]) // rows if rows else 0
    for name, value in kept.items():
        if value is None:
            continue
        small = small_states.get(name)
        if not isinstance(value, Tensor):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UnsavableStateError(
                    f"keeps a state {name} that is a {type(value).__name__}; keep a tensor"
                )
            kind = type(value).__name__
            yield OptimizerState(name=name, shape=FixedShape(()), dtype=kind, initial=None)
            continue
        if type(value) not in (Tensor, nn.Parameter):
            message = f"keeps a state {name} that is a {type(value).__name__}; keep a plain tensor"
            raise UnsavableStateError(f"{message}, and its scales as states of their own")
        size, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        if small is not None and small.shape(tried) == size and _is_of(small, dtype, value.ndim):
            yield small
        elif size == tried:
            yield OptimizerState(name=name, shape=like_parameter, dtype=dtype, initial=None)
        else:
            larger = grown.get(name)
            full = _extended(size, tuple(larger.shape), times) if larger is not None else None
            if full is None:
                message = f"keeps a state {name} of shape {list(size)} of a parameter of shape "
                message += f"{list(tried)}, which does not grow with it evenly"
                raise UnsavableStateError(message)
            yield OptimizerState(name=name, shape=FixedShape(full), dtype=dtype, initial=None)


def large_shape(ndim: int) -> Shape:
    """Return the shape of a parameter that is large enough to be quantized."""
    return (_ENOUGH,) if ndim == 1 else (512, 256, 2, 2, 2)[:ndim]


def depends_on_blocks(states: Iterator[OptimizerState]) -> bool:
    """Return whether a state has a size other than the parameter's dims or one number."""
    return any(
        isinstance(state.shape, FixedShape) and math.prod(state.shape.shape) > 1 for state in states
    )


def _is_of(state: OptimizerState, dtype: str, ndim: int) -> bool:
    is_like = state.dtype == "parameter"
    return dtype == ("float32" if is_like else state.dtype) and (ndim > 0 or not is_like)


def _representative(shape: Shape) -> tuple[Shape, int]:
    """Return the shape of a smaller parameter whose last block is as full, and rows to add to it.

    The rows are whole blocks; they are 0 if the parameter itself is small enough. Example: (50257,
    768) becomes (113, 768) and 32, since 32 rows are 3 * 8192 elements and 50257 = 113 + 1567 * 32.
    """
    if math.prod(shape) <= _ENOUGH:
        return shape, 0
    row = math.prod(shape[1:])
    rows = _BLOCKS // math.gcd(row, _BLOCKS)
    least = -(-_ENOUGH // row)
    kept = shape[0] % rows + -(-least // rows) * rows
    return ((kept, *shape[1:]), rows) if kept + rows <= shape[0] else (shape, 0)


def _extended(size: Shape, larger: Shape, times: int) -> Shape | None:
    """Return a state's size after rows were added several times; None if it does not grow evenly.

    Args:
        size: The state's size for the smaller parameter.
        larger: The size after rows were added once.
        times: Number of additions.
    """
    if len(size) != len(larger) or sum(a != b for a, b in zip(size, larger, strict=True)) > 1:
        return None
    return tuple(a + (b - a) * times for a, b in zip(size, larger, strict=True))
