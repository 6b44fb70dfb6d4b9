"""Records how transformers' code initializes each parameter of a model without storage.

transformers draws the weights of all modules from one generator, so each weight depends on the
previous draws. Here the operations are recorded and repeated for each parameter with a generator
that is seeded by its name. A parameter with an initialization that needs other tensors is drawn in
full.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch.models.tensors.initialization import Constant, Initializer
from axonlaunch.models.torch_internals import storage_key

_aten = torch.ops.aten
_REPLACING = {
    *(_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default),
    *(_aten.fill_.Scalar, _aten.fill_.Tensor),
}
"""Operations that replace every element, independent of previous values."""
_CHANGING = {
    *(_aten.mul_.Tensor, _aten.add_.Tensor, _aten.erfinv_.default, _aten.clamp_.default),
    *(_aten.sub_.Tensor, _aten.div_.Tensor),
}
"""Elementwise operations, as used to draw from a truncated normal distribution."""
_RANDOM = {_aten.normal_.default, _aten.uniform_.default}
_KEPT = 2**16
"""Parameters up to this number of elements keep their first value, like a norm's ones."""
_LARGE = 2**26
"""Tensors from this number of elements are created without storage, like all experts of a block."""


@dataclass(frozen=True)
class Step:
    """An in-place operation on all elements or on some rows.

    Attributes:
        operation: torch operation with the tensor as its first argument.
        arguments: Other arguments, all of them numbers.
        rows: First and last + 1 of the changed rows; None for all rows.
    """

    operation: Any
    arguments: tuple[Any, ...] = ()
    rows: tuple[int, int] | None = None

    def apply(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Run the operation."""
        options = {"generator": generator} if self.operation in _RANDOM else {}
        self.operation(tensor, *self.arguments, **options)


@dataclass(frozen=True)
class Recorded(Initializer):
    """Initializer that repeats recorded operations on any block of rows.

    Attributes:
        steps: Operations on all rows, in order.
        constant_rows: Later operations on some rows, such as zeros for padding in an embedding.
    """

    steps: tuple[Step, ...]
    constant_rows: tuple[Step, ...] = ()
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Draw fp32 values of a shape, by the recorded operations."""
        values = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
        for step in self.steps:
            step.apply(values, generator)
        return values


@dataclass(frozen=True)
class Whole(Initializer):
    """Initializer of a parameter that is drawn only in full, by the code of its module.

    Attributes:
        module: Module with the parameter, without storage.
        name: Name of the parameter in the module.
        initialize: The model's function that initializes such modules.
    """

    module: nn.Module
    name: str
    initialize: Any
    key: str | None = None
    blockwise: ClassVar[bool] = False

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape, which must be that of the full parameter."""
        module = copy.deepcopy(self.module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            real = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            setattr(module, name, nn.Parameter(real))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(generator.initial_seed())
            self.initialize(module)
        values: Tensor = module.get_parameter(self.name).detach().float()
        assert values.shape == torch.Size(shape), "a parameter is drawn as a whole"
        return values


@dataclass(frozen=True)
class Given(Initializer):
    """Initializer with the values that the code of a module computed."""

    values: Tensor
    key: str | None = None
    blockwise: ClassVar[bool] = False

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return fp32 values of the shape, which must be that of the full parameter."""
        assert self.values.shape == torch.Size(shape), "a parameter is given as a whole"
        return self.values.float()


@dataclass
class _Program:
    """Operations on one parameter so far.

    Attributes:
        parameter: Parameter without storage; the reference keeps its storage key unique.
        first: Initial value; None if it was too large to keep.
        steps: Operations since the last one that replaced all elements.
        is_whole: Whether there were other operations since then, so the parameter must be drawn in
            full.
    """

    parameter: nn.Parameter
    first: Tensor | None
    steps: list[Step] = field(default_factory=list)
    rows: list[Step] = field(default_factory=list)
    is_whole: bool = False

    def record(self, operation: Any, target: Tensor, arguments: tuple[Any, ...]) -> None:
        """Record an in-place operation on the parameter or a part of it."""
        numbers = _numbers(arguments)
        is_full = target.numel() == self.parameter.numel()
        if is_full and operation in _REPLACING and numbers is not None:
            self.steps, self.rows, self.is_whole = [Step(operation, numbers)], [], False
        elif is_full and operation in _CHANGING and numbers is not None and not self.rows:
            self.steps.append(Step(operation, numbers))
        elif (rows := self._rows(target)) and operation in _REPLACING - _RANDOM:
            if numbers is None:
                self.is_whole = True
            else:
                self.rows.append(Step(operation, numbers, rows))
        else:
            self.is_whole = True

    def _rows(self, target: Tensor) -> tuple[int, int] | None:
        """Return the range of complete rows that a part covers; otherwise None."""
        width = self.parameter[0].numel() if self.parameter.ndim else 0
        start = target.storage_offset()
        if not width or not target.is_contiguous() or start % width or target.numel() % width:
            return None
        return start // width, (start + target.numel()) // width


class WeightRecorder(TorchDispatchMode):
    """Creates parameters without storage within its context and records their initialization."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._programs: dict[int, _Program] = {}  # by storage key
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # Contrary to its annotation, the hook may return a parameter to register.
        register: Any = register_module_parameter_registration_hook
        hook = register(self._register)
        self._stack.callback(hook.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._stack.close()

    def initializers(self, model: nn.Module) -> dict[str, Initializer]:
        """Return the initializers of a model that was created in the context.

        They refer to the model, which must not be changed afterwards; shard a copy instead.

        Raises:
            ValueError: A parameter was never given values.
        """
        return dict(self._initializer_items(model))

    def _initializer_items(self, model: nn.Module) -> Any:
        programs = {id(recorded.parameter): recorded for recorded in self._programs.values()}
        for name, parameter in model.named_parameters():
            # Look up by identity, because code that sets ``parameter.data`` changes the storage.
            program = programs[id(parameter)]
            owner, _, parameter_name = name.rpartition(".")
            if program.is_whole:
                yield (
                    name,
                    Whole(
                        model.get_submodule(owner),
                        parameter_name,
                        _initializing_method(model, owner),
                    ),
                )
            elif program.steps:
                yield name, Recorded(tuple(program.steps), tuple(program.rows))
            elif program.first is not None:
                yield name, _from_values(program.first)
            else:
                raise ValueError(f"the model's own code gives {name} no initial values")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.empty.memory_format and prod(args[0]) >= _LARGE:
            kwargs = {**(kwargs or {}), "device": torch.device("meta")}
        result = func(*args, **(kwargs or {}))
        target = args[0] if args else None
        if isinstance(target, Tensor) and target.is_meta and func._schema.is_mutable:
            program = self._programs.get(storage_key(target))
            if program is not None:
                numbers = tuple(v for k, v in (kwargs or {}).items() if k != "generator")
                program.record(func, target, (*args[1:], *numbers))
        return result

    def _register(
        self, module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        del module, name
        if parameter is None:
            return None
        if parameter.is_meta:
            self._programs.setdefault(storage_key(parameter), _Program(parameter, None))
            return None
        original = parameter.detach().clone() if parameter.numel() <= _KEPT else None
        replacement = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        self._programs[storage_key(replacement)] = _Program(replacement, original)
        return replacement


def _numbers(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return arguments as numbers; None if one of them has several elements or no value."""
    numbers: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.is_meta or argument.numel() != 1:
                return None
            numbers.append(argument.item())
        elif argument is None or isinstance(argument, bool | int | float):
            numbers.append(argument)
        else:
            return None
    return tuple(numbers)


def _from_values(values: Tensor) -> Initializer:
    flat = values.flatten()
    if flat.numel() and bool((flat == flat[0]).all()):
        return Constant(float(flat[0]))
    return Given(values)


def _initializing_method(model: Any, owner: str) -> Any:
    """Return the method that initializes a module: that of the innermost ``PreTrainedModel``.

    ``PreTrainedModel.initialize_weights`` finds the same method.
    """
    from axonlaunch.models.hf.reading import library

    model_part, current, path = model, model, [part for part in owner.split(".") if part]
    for part in path:
        current = getattr(current, part)
        if isinstance(current, library.transformers().PreTrainedModel):
            model_part = current
    return model_part._init_weights
