"""How each parameter of a model starts, recorded while its own code initialises it without storage.

transformers draws a module's weights one after another from one generator, so that they depend on
what was drawn before; here the same operations are noted, and repeated for each parameter from
a generator of its name. What an operation needs of other tensors is drawn as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch.models.initialization import Constant, Initializer
from axonlaunch.models.torch_internals import storage_key

_aten = torch.ops.aten
_REPLACING = {
    *(_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default),
    *(_aten.fill_.Scalar, _aten.fill_.Tensor),
}
"""Give every element a value of its own, whatever was there."""
_CHANGING = {
    *(_aten.mul_.Tensor, _aten.add_.Tensor, _aten.erfinv_.default, _aten.clamp_.default),
    *(_aten.sub_.Tensor, _aten.div_.Tensor),
}
"""Change every element by itself, as in drawing from a truncated normal distribution."""
_RANDOM = {_aten.normal_.default, _aten.uniform_.default}
_KEPT = 2**16
"""Elements of a parameter whose first value is kept: a norm's ones, a gate's zero."""
_LARGE = 2**26
"""Elements of a tensor that is made without storage at once: all experts of a block, say."""


@dataclass(frozen=True)
class Step:
    """An operation in place, on all elements or on some rows.

    Attributes:
        operation: Of torch, with the tensor as its first argument.
        arguments: The others, numbers alone.
        rows: The first and the last + 1 of the rows that it changes; None: all.
    """

    operation: Any
    arguments: tuple[Any, ...] = ()
    rows: tuple[int, int] | None = None

    def apply(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Do it."""
        drawn = {"generator": generator} if self.operation in _RANDOM else {}
        self.operation(tensor, *self.arguments, **drawn)


@dataclass(frozen=True)
class Recorded:
    """Operations that give a parameter its values, in any blocks of rows.

    Attributes:
        steps: Those on all rows, in turn.
        constant_rows: Those on some rows, after them: an embedding's zeros for padding.
    """

    steps: tuple[Step, ...]
    constant_rows: tuple[Step, ...] = ()
    key: str | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape."""
        values = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
        for step in self.steps:
            step.apply(values, generator)
        return values


@dataclass(frozen=True)
class Whole:
    """A parameter that can't be drawn in parts: its module's own code draws all of it.

    Attributes:
        module: That holds it, without storage.
        name: Of the parameter in the module.
        initialise: What the model does with such a module.
    """

    module: nn.Module
    name: str
    initialise: Any
    key: str | None = None
    blockwise: bool = False

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 values of the shape, which is the whole parameter's."""
        module = copy.deepcopy(self.module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            real = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            setattr(module, name, nn.Parameter(real))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(generator.initial_seed())
            self.initialise(module)
        values: Tensor = module.get_parameter(self.name).detach().float()
        assert values.shape == torch.Size(shape), "a parameter is drawn as a whole"
        return values


@dataclass(frozen=True)
class Given:
    """A parameter that starts as its module's code wrote it."""

    values: Tensor
    key: str | None = None
    blockwise: bool = False

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return fp32 values of the shape, which is the whole parameter's."""
        assert self.values.shape == torch.Size(shape), "a parameter is given as a whole"
        return self.values.float()


@dataclass
class _Program:
    """What happened to one parameter so far.

    Attributes:
        parameter: Without storage; it is kept, so that its storage stays its own.
        first: The value that it was made with; None: it was too large to keep.
        steps: Since the last that replaced all elements.
        is_whole: Whether something else than such steps happened since then.
    """

    parameter: nn.Parameter
    first: Tensor | None
    steps: list[Step] = field(default_factory=list)
    rows: list[Step] = field(default_factory=list)
    is_whole: bool = False

    def note(self, operation: Any, target: Tensor, arguments: tuple[Any, ...]) -> None:
        """Take down an operation in place on the parameter, or a part of it."""
        plain = _numbers(arguments)
        whole = target.numel() == self.parameter.numel()
        if whole and operation in _REPLACING and plain is not None:
            self.steps, self.rows, self.is_whole = [Step(operation, plain)], [], False
        elif whole and operation in _CHANGING and plain is not None and not self.rows:
            self.steps.append(Step(operation, plain))
        elif (rows := self._rows(target)) and operation in _REPLACING - _RANDOM:
            if plain is None:
                self.is_whole = True
            else:
                self.rows.append(Step(operation, plain, rows))
        else:
            self.is_whole = True

    def _rows(self, target: Tensor) -> tuple[int, int] | None:
        """Return which whole rows of the parameter a part of it is; None if it is none."""
        width = self.parameter[0].numel() if self.parameter.ndim else 0
        start = target.storage_offset()
        if not width or not target.is_contiguous() or start % width or target.numel() % width:
            return None
        return start // width, (start + target.numel()) // width


class WeightRecorder(TorchDispatchMode):
    """Keeps parameters that are made in its context without storage, and how they start."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._programs: dict[int, _Program] = {}  # by the parameters' storages
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # Its annotation denies what its docstring says: what a hook returns is registered.
        register: Any = register_module_parameter_registration_hook
        hook = register(self._register)
        self._stack.callback(hook.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._stack.close()

    def initializers(self, model: nn.Module) -> dict[str, Initializer]:
        """Return how each parameter of a model that was made in the context starts.

        They refer to the model, which has to stay as it is: who divides one takes a copy.

        Raises:
            ValueError: Nothing gave a parameter values.
        """
        return dict(self._each(model))

    def _each(self, model: nn.Module) -> Any:
        of_parameter = {id(recorded.parameter): recorded for recorded in self._programs.values()}
        for name, parameter in model.named_parameters():
            # Code that sets ``parameter.data`` gives it another storage, padded or so.
            program = of_parameter[id(parameter)]
            owner, _, own = name.rpartition(".")
            if program.is_whole:
                yield name, Whole(model.get_submodule(owner), own, _initialise(model, owner))
            elif program.steps:
                yield name, Recorded(tuple(program.steps), tuple(program.rows))
            elif program.first is not None:
                yield name, _as_given(program.first)
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
                program.note(func, target, (*args[1:], *numbers))
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
        made = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        self._programs[storage_key(made)] = _Program(made, original)
        return made


def _numbers(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return arguments as numbers; None where one is more than that."""
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


def _as_given(values: Tensor) -> Initializer:
    flat = values.flatten()
    if flat.numel() and bool((flat == flat[0]).all()):
        return Constant(float(flat[0]))
    return Given(values)


def _initialise(model: Any, owner: str) -> Any:
    """Return what draws the weights of a module: its own model's method, of nested ones the inner.

    As ``PreTrainedModel.initialize_weights`` finds it.
    """
    from axonlaunch.models.hf import library

    module, at, path = model, model, [part for part in owner.split(".") if part]
    for part in path:
        at = getattr(at, part)
        if isinstance(at, library.transformers().PreTrainedModel):
            module = at
    return module._init_weights
