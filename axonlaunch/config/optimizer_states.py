"""What others must know of an optimizer: the states that it keeps, and what it needs to be whole.

It describes tensors and makes none; ``axonlaunch.engines.optimizer.optimizers`` allocates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Shape = tuple[int, ...]
Sharding = Literal["elementwise", "collective", "whole"]

_BYTES = {"float32": 4, "int64": 8, "float64": 8, "bfloat16": 2, "float16": 2}
_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int16": 2, "int": 8, "float": 8}
"""Of an element, by dtype; numbers of Python's are saved in 8 bytes."""


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """What an optimizer's states and its choice of options depend on.

    Attributes:
        name: Fully-qualified, in the whole model.
        shape: Of the whole parameter.
        is_hidden_matrix: Whether it is a matrix of one of the model's repeated blocks, and no
            embedding's.
    """

    name: str
    shape: Shape
    is_hidden_matrix: bool = False


def like_parameter(shape: Shape) -> Shape | None:
    """Return the shape of a state that has an element for each of the parameter's."""
    return shape


def one_number(shape: Shape) -> Shape | None:
    """Return the shape of a number, such as a count of steps."""
    del shape
    return ()


def row_means(shape: Shape) -> Shape | None:
    """Return the shape of a number for each row, [..., m, 1]; of vectors there is none."""
    return (*shape[:-1], 1) if len(shape) > 1 else None


def column_means(shape: Shape) -> Shape | None:
    """Return the shape of a number for each column, [..., 1, n]; of vectors there is none."""
    return (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None


def of_vectors(shape: Shape) -> Shape | None:
    """Return the parameter's own shape where it is a vector; of matrices there is none."""
    return shape if len(shape) < 2 else None


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """One tensor that an optimizer keeps of each parameter.

    Attributes:
        name: torch's key of it in ``optimizer.state[parameter]``.
        shape: The whole parameter's shape to the state's, each dim of which is the parameter's or
            1; None of a parameter that has no such state.
        dtype: Name of torch's, ``"parameter"`` for the parameter's own, or ``"int"`` and
            ``"float"`` for a number of Python's.
        initial: What it is filled with before the first step; None: the optimizer makes it in its
            first step, and nobody else can before.
        absent_at_zero: The configuration's field without which there is no such state; None: it
            is always there.
        on_host: Whether it is in host memory wherever the parameter is.
    """

    name: str
    shape: Callable[[Shape], Shape | None] = like_parameter
    dtype: str = "parameter"
    initial: float | None = 0.0
    absent_at_zero: str | None = None
    on_host: bool = False

    def kept_dims(self, ndim: int) -> tuple[int, ...]:
        """Return the dims of a parameter of so many dims that this state has too.

        The rule is asked about a shape whose dims all differ: row means of (2, 3) are (2, 1), so
        that dim 0 is kept, also of a parameter of one row.
        """
        asked = tuple(range(2, 2 + ndim))
        shape = self.shape(asked)
        if shape is None or len(shape) != ndim:
            return ()
        return tuple(dim for dim in range(ndim) if shape[dim] == asked[dim])

    def nbytes(self, shape: Shape, *, element: int = 4) -> int:
        """Return the bytes of this state of a whole parameter, whose elements have so many."""
        own = self.shape(shape)
        size = element if self.dtype == "parameter" else _BYTES[self.dtype]
        return 0 if own is None else math.prod(own) * size


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What others must know of an optimizer, and can't ask its class.

    Attributes:
        states: What it keeps of each parameter; None: it is tried on small parameters.
        sharding: What it makes of a parameter that is divided among ranks. elementwise: each
            element's update depends on that element alone, so that it is given each rank's part as
            a tensor of its own; collective: it is given DTensors and exchanges what it needs;
            whole: it needs the whole parameter, and layouts that divide one are refused. None: it
            is tried on small parameters whether it is the first or the last.
        fixed: Keyword arguments of the class that are no choice of a user's, ``{"fused": True}``.
    """

    states: tuple[OptimizerState, ...] | None = None
    sharding: Sharding | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)


_STEP = OptimizerState(name="step", shape=one_number, dtype="float32")
_HOST_STEP = OptimizerState(name="step", shape=one_number, dtype="float32", on_host=True)
_MOMENTS = (OptimizerState(name="exp_avg"), OptimizerState(name="exp_avg_sq"))

ADAM = OptimizerFacts(states=(_STEP, *_MOMENTS), sharding="elementwise", fixed={"fused": True})
"""Of Adam and AdamW."""
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
        OptimizerState(name="variance", shape=of_vectors),
    ),
    sharding="collective",
    # torch's foreach holds the updates of all parameters at once, which are what it is to save.
    fixed={"foreach": False},
)
MUON = OptimizerFacts(states=(OptimizerState(name="momentum_buffer"),), sharding="collective")
"""Of what Muon updates; the other parameters have AdamW's."""
