"""Facts about optimizers: the states of each parameter, and support for sharded parameters.

``axonlaunch.engines.optimizer.optimizers`` allocates the states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from axonlaunch.config.precision import BLOCK, SCALE_BYTES

Shape = tuple[int, ...]
Sharding = Literal["elementwise", "collective", "whole"]

_BYTES = {"float32": 4, "int64": 8, "float64": 8, "bfloat16": 2, "float16": 2}
_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int16": 2, "int": 8, "float": 8}
"""Bytes per element by dtype; Python numbers are saved in 8 bytes."""
_LEAST_QUANTIZED = 4096
"""Elements from which a parameter's states are quantized."""


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """Properties of a parameter that its optimizer states and options depend on.

    Attributes:
        name: Fully-qualified name in the model.
        shape: Shape of the full parameter.
        is_hidden_matrix: Whether the parameter is a matrix in one of the repeated blocks of the
            model, and not of an embedding, or has a matrix for each expert.
    """

    name: str
    shape: Shape
    is_hidden_matrix: bool = False


def like_parameter(shape: Shape) -> Shape | None:
    """Return the shape of a state with the shape of the parameter."""
    return shape


def one_number(shape: Shape) -> Shape | None:
    """Return the shape of a scalar state, such as a step count."""
    del shape
    return ()


def row_means(shape: Shape) -> Shape | None:
    """Return the shape of row means, [..., m, 1]; None for vectors."""
    return (*shape[:-1], 1) if len(shape) > 1 else None


def column_means(shape: Shape) -> Shape | None:
    """Return the shape of column means, [..., 1, n]; None for vectors."""
    return (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None


def packed_blocks(shape: Shape) -> Shape | None:
    """Return the shape of a state in 8 bits: codes and scale of each block along the last dim."""
    return (*shape[:-1], shape[-1] // BLOCK, BLOCK + SCALE_BYTES)


def vector_shape(shape: Shape) -> Shape | None:
    """Return the shape of a state with the shape of a vector; None for matrices."""
    return shape if len(shape) < 2 else None


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """One state that an optimizer keeps for each parameter.

    Attributes:
        name: Key of the state in ``optimizer.state[parameter]``.
        shape: Function from the full parameter's shape to the state's shape, or to None for
            parameters without this state. Each dim of the state has the size of the parameter's dim
            or 1.
        dtype: Name of a torch dtype, ``"parameter"`` for the dtype of the parameter, or ``"int"``
            or ``"float"`` for a Python number.
        initial: Value of all elements before the first step; None if only the optimizer can create
            the state, in its first step.
        absent_at_zero: Field of the configuration; if its value is 0, there is no such state. None
            if the state always exists.
        on_host: Whether the state is in host memory even if the parameter is not.
        is_positive: Whether no element is negative, so that codes in 8 bits need no sign.
        is_packed: Whether the state is stored in 8 bits: in blocks along the last dim.
    """

    name: str
    shape: Callable[[Shape], Shape | None] = like_parameter
    dtype: str = "parameter"
    initial: float | None = 0.0
    absent_at_zero: str | None = None
    on_host: bool = False
    is_positive: bool = False
    is_packed: bool = False

    def in_blocks(self, shape: Shape) -> OptimizerState:
        """Return the same state in 8 bits, if that is possible.

        Args:
            shape: Shape of the full parameter. Vectors and parameters of few elements have other
                states, as those of bitsandbytes and torchao, and so have rows of broken blocks.
        """
        is_large = math.prod(shape) >= _LEAST_QUANTIZED and len(shape) > 1
        if self.dtype != "parameter" or not is_large or shape[-1] % BLOCK:
            return self
        return replace(self, shape=packed_blocks, dtype="uint8", is_packed=True)

    def kept_dims(self, ndim: int) -> tuple[int, ...]:
        """Return the dims that the state shares with a parameter of ``ndim`` dims.

        They are found with a shape of different sizes: row means of (2, 3) have the shape (2, 1),
        so dim 0 is kept, even for parameters with one row.
        """
        probe = tuple(range(2, 2 + ndim))
        shape = self.shape(probe)
        if shape is None or len(shape) != ndim:
            return ()
        return tuple(dim for dim in range(ndim) if shape[dim] == probe[dim])

    def nbytes(self, shape: Shape, *, element: int = 4) -> int:
        """Return the bytes of this state for a parameter of a shape and ``element`` bytes each."""
        state_shape = self.shape(shape)
        size = element if self.dtype == "parameter" else _BYTES[self.dtype]
        return 0 if state_shape is None else math.prod(state_shape) * size


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Properties of an optimizer that its class does not tell.

    Attributes:
        states: States of each parameter; None finds them by steps on small parameters.
        sharding: Support for parameters that are divided among ranks. ``"elementwise"``: the update
            of an element depends only on that element, so the optimizer gets each rank's part as a
            plain tensor. ``"collective"``: the optimizer gets DTensors and communicates.
            ``"whole"``: the optimizer needs full parameters, so layouts that divide them are an
            error. None finds out by steps on small parameters whether it is elementwise or whole.
        fixed: Keyword arguments of the class that the user can't set, ``{"fused": True}``.
    """

    states: tuple[OptimizerState, ...] | None = None
    sharding: Sharding | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)


_STEP = OptimizerState(name="step", shape=one_number, dtype="float32")
_HOST_STEP = OptimizerState(name="step", shape=one_number, dtype="float32", on_host=True)
_MOMENTS = (
    OptimizerState(name="exp_avg"),
    OptimizerState(name="exp_avg_sq", is_positive=True),
)

ADAM = OptimizerFacts(states=(_STEP, *_MOMENTS), sharding="elementwise", fixed={"fused": True})
"""Facts about Adam and AdamW."""
SGD = OptimizerFacts(
    states=(OptimizerState(name="momentum_buffer", absent_at_zero="momentum"),),
    sharding="elementwise",
    fixed={"fused": True},
)
NADAM = OptimizerFacts(
    states=(
        _HOST_STEP,
        OptimizerState(
            name="mu_product", shape=one_number, dtype="float32", initial=1.0, on_host=True
        ),
        *_MOMENTS,
    ),
    sharding="elementwise",
    fixed={"foreach": True},
)
LION = OptimizerFacts(states=(OptimizerState(name="exp_avg"),), sharding="elementwise")
ADAFACTOR = OptimizerFacts(
    states=(
        _HOST_STEP,
        OptimizerState(name="row_var", shape=row_means),
        OptimizerState(name="col_var", shape=column_means),
        OptimizerState(name="variance", shape=vector_shape),
    ),
    sharding="collective",
    # With foreach, the updates of all parameters exist at once, which Adafactor is meant to avoid.
    fixed={"foreach": False},
)
MUON = OptimizerFacts(states=(OptimizerState(name="momentum_buffer"),), sharding="collective")
"""States of the parameters that Muon updates; the others have the states of AdamW."""
