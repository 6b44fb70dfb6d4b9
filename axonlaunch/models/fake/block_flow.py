"""Finds the modules and tensors around a model's blocks by running it on fake tensors.

A pipeline must know which parameters are used before, in and after the blocks, and that only hidden
states pass from block to block. If other tensors pass too, the result says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.specs.model_spec import BlockFlow, Dim, ModelOutputs
from axonlaunch.models.specs.router_loss import RouterLoss, RouterLossModel
from axonlaunch.models.tensors.initialization import materialize
from axonlaunch.models.torch_internals import storage_key

_SAMPLES = ((2, 6), (3, 10))
"""Batch size and length of the two runs; their shapes show the meaning of each dimension."""
BATCH, LENGTH, TOKENS = "batch", "length", "tokens"


class _ImpassableError(Exception):
    """A pipeline can't cut the model; the message says why."""


class _StopRunError(BaseException):
    """Ends a run early, when the first block is reached."""


def block_flow(model: nn.Module, *, layers: str) -> BlockFlow:
    """Run a token model on two samples and return the modules and tensors around its blocks.

    Args:
        model: Model without storage; it is not changed.
        layers: Path of the list of blocks.
    """
    silence_fake_tensors()
    try:
        runs = [_Run(copy.deepcopy(model), layers=layers, sample=sample) for sample in _SAMPLES]
        runs[0].full()
        runs[1].preamble()
        before_blocks, after_blocks = runs[0].ends()
        shapes = {name: _shape(name, [run.shapes for run in runs]) for name in before_blocks}
        written = frozenset(runs[0].written & {*before_blocks})
        return BlockFlow(before_blocks, after_blocks, shapes, written, tuple(runs[0].returns))
    except _ImpassableError as reason:
        return BlockFlow(problem=str(reason))
    except Exception as error:  # a user's model may need values, or fail in any way
        details = " ".join(str(error).split())[:200]
        problem = f"running it without values fails with {type(error).__name__}: {details}"
        return BlockFlow(problem=problem)


class _Run:
    """A run of one sample through a model on fake tensors.

    Attributes:
        shapes: ``{module outside of the blocks: its output shapes}``.
        written: See ``BlockFlow.written``.
        returns: See ``BlockFlow.returns``.
    """

    def __init__(self, model: nn.Module, *, layers: str, sample: tuple[int, int]) -> None:
        self._model, self._layers, self._sample = model, layers, sample
        blocks: Any = model.get_submodule(layers)
        self._blocks: Sequence[nn.Module] = list(blocks)
        self.shapes: dict[str, set[tuple[int, ...]]] = {}
        self.written: set[str] = set()
        self.returns: list[int | None] = []
        self._outputs: list[tuple[str, Tensor, int]] = []
        self._watch = _Watch()
        self._stops_at_blocks = False
        self._previous: Tensor | None = None
        for number, block in enumerate(self._blocks):
            block.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: self._enter(number, args, kwargs),
                with_kwargs=True,
            )
            block.register_forward_hook(
                lambda _, __, output, number=number: self._leave(number, output)
            )
        for name, module in model.named_modules():
            if not f"{name}.".startswith(f"{layers}.") and _own_parameters(module):
                module.register_forward_hook(
                    lambda _, __, output, name=name: self._note(name, output)
                )

    def preamble(self) -> None:
        """Run the part of the model before the blocks."""
        self._stops_at_blocks = True
        try:
            self.full()
        except _StopRunError:
            return

    def full(self) -> None:
        """Run the whole model.

        Raises:
            _ImpassableError: A pipeline can't cut the model.
        """
        with fake_tensor_mode():
            materialize(self._model, device="cpu")
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                self._watch.parameters.setdefault(storage_key(parameter), []).append(name)
                if not parameter.requires_grad:
                    self._watch.fixed.add(storage_key(parameter))
            tokens = torch.zeros(self._sample, dtype=torch.int64)
            self._watch.depend(tokens)
            # An engine computes a router's loss in parts, so the model only returns logits.
            loss: AbstractContextManager[None] = nullcontext()
            if isinstance(self._model, RouterLossModel) and self._model.shares_router_loss:
                loss = RouterLoss(lambda _: None).running("off")
            with self._watch, loss:
                outputs = self._model(tokens)
        if len(self.returns) < len(self._blocks):
            raise _ImpassableError(f"{self._layers}.{len(self.returns)} is not called")
        if isinstance(outputs, ModelOutputs):
            raise _ImpassableError(
                "its auxiliary loss needs all blocks, which no stage has; use "
                "model.router_aux_loss=false"
            )
        if self._watch.depends(outputs):
            raise _ImpassableError(
                "the output of its head depends on more than the output of the last block"
            )

    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the modules with parameters that are used before and after the blocks.

        Raises:
            _ImpassableError: A parameter is also used elsewhere, or without a call of its module.
        """
        blocks = tuple(f"{self._layers}.{number}." for number in range(len(self._blocks)))
        ends: tuple[dict[str, None], dict[str, None]] = ({}, {})
        for name, module in self._model.named_modules():
            if f"{name}.".startswith(blocks) or not (own_parameters := _own_parameters(module)):
                continue
            names = [f"{name}.{parameter}" if name else parameter for parameter in own_parameters]
            phases = {phase for parameter in names for phase in self._watch.phases_of(parameter)}
            if self._layers.startswith(f"{name}.") or not name:
                raise _ImpassableError(
                    f"{names[0]} is used outside of the blocks and is not in a separate module"
                )
            end = self._end_of(name, names[0], phases)
            ends[end][name] = None
        for number, block in enumerate(blocks):
            self._refuse_foreign(number, block)
        return tuple(ends[0]), tuple(ends[1])

    def _end_of(self, module: str, parameter: str, phases: set[int]) -> int:
        """Return 0 for a module before the blocks, 1 for a module after them.

        Raises:
            _ImpassableError: The module is neither.
        """
        last = len(self._blocks)
        tied = len(self._watch.names_of(parameter)) > 1
        if phases - {-1, last}:
            raise _ImpassableError(f"{parameter} is used in blocks but is not part of any block")
        called = module in self.shapes
        if phases == {-1, last} and not tied:
            raise _ImpassableError(f"{parameter} is used both before and after the blocks")
        if phases == {-1, last}:
            # The parameter is tied between two modules; one of them is called before the blocks.
            return 0 if self._watch.called_in.get(module, -1) == -1 else 1
        if -1 in phases and not called:
            raise _ImpassableError(f"{parameter} is used without {module} being called")
        return 1 if last in phases else 0

    def _refuse_foreign(self, number: int, block: str) -> None:
        """Refuse a block parameter that is used outside of its block."""
        for name in self._watch.names():
            if name.startswith(block) and (others := self._watch.phases_of(name) - {number}):
                location = (
                    "outside of the blocks"
                    if others & {-1, len(self._blocks)}
                    else "in other blocks"
                )
                raise _ImpassableError(f"{name} is used {location} too")

    def _enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stops_at_blocks:
            raise _StopRunError
        if number == 0:
            self.written = {
                name for name, output, version in self._outputs if output._version > version
            }
            self._outputs.clear()
        if number != len(self.returns):
            raise _ImpassableError(f"{self._layers}.{number} is called out of order")
        inputs = {**{f"argument {n}": argument for n, argument in enumerate(args)}, **kwargs}
        hidden = self._previous
        if hidden is None:
            hidden = next(
                (argument for argument in inputs.values() if isinstance(argument, Tensor)), None
            )
        if not args or args[0] is not hidden:
            raise _ImpassableError(
                f"{self._layers}.{number} is not given the output of the previous block"
            )
        for name, value in inputs.items():
            for tensor in tree_leaves(value):
                if not isinstance(tensor, Tensor) or tensor is hidden:
                    continue
                if reason := self._explain_foreign(tensor):
                    raise _ImpassableError(
                        f"{self._layers}.{number} is given {name}, which {reason}, in "
                        "addition to the hidden states; a pipeline passes only hidden states "
                        "between stages"
                    )
        self._watch.phase = number

    def _explain_foreign(self, tensor: Tensor) -> str:
        """Return why other stages can't compute a tensor themselves; empty if they can."""
        if tensor.requires_grad:
            return "is trained"
        if self._watch.depends(tensor):
            return "depends on the tokens"
        return "is made of a parameter" if self._watch.is_fixed(tensor) else ""

    def _leave(self, number: int, output: Any) -> None:
        is_tuple = isinstance(output, tuple)
        hidden = output[0] if is_tuple and output else output
        if not isinstance(hidden, Tensor):
            raise _ImpassableError(f"{self._layers}.{number} returns {type(output).__name__}")
        self.returns.append(len(output) if is_tuple else None)
        self._previous = hidden
        self._watch.phase = number + 1
        if number + 1 == len(self._blocks):
            self._watch.forget(hidden)

    def _note(self, name: str, output: Any) -> None:
        self._watch.called_in.setdefault(name, self._watch.phase)
        shape = tuple(output.shape) if isinstance(output, Tensor) else ()
        self.shapes.setdefault(name, set()).add(shape)
        if isinstance(output, Tensor) and self._watch.phase == -1:
            self._outputs.append((name, output, output._version))


class _Watch(TorchDispatchMode):
    """Tracks which tensors depend on the tokens, and when each parameter is used.

    Attributes:
        phase: -1 before the blocks, then the index of each block, then the number of blocks.
        parameters: Names of each parameter, by storage.
        fixed: Storages of parameters that are not trained.
        called_in: ``{module: phase of its first call}``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = -1
        self.parameters: dict[int, list[str]] = {}
        self.fixed: set[int] = set()
        self.called_in: dict[str, int] = {}
        self._phases: dict[int, set[int]] = {}
        self._dependent: dict[int, Any] = {}
        self._of_fixed: dict[int, Any] = {}

    def depend(self, tensor: Tensor) -> None:
        """Mark a tensor as dependent on the tokens."""
        # Keep the storage, so that no other storage gets its key.
        self._dependent[storage_key(tensor)] = tensor.untyped_storage()

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the tokens."""
        return storage_key(tensor) in self._dependent

    def is_fixed(self, tensor: Tensor) -> bool:
        """Return whether a tensor was computed from frozen parameters before the blocks."""
        return storage_key(tensor) in self._of_fixed or storage_key(tensor) in self.fixed

    def forget(self, tensor: Tensor) -> None:
        """Mark a tensor as independent of the tokens."""
        self._dependent.pop(storage_key(tensor), None)

    def names(self) -> Iterator[str]:
        """Yield all parameter names."""
        for names in self.parameters.values():
            yield from names

    def names_of(self, parameter: str) -> list[str]:
        """Return all names of one parameter."""
        return next(names for names in self.parameters.values() if parameter in names)

    def phases_of(self, parameter: str) -> set[int]:
        """Return the phases in which a parameter was used."""
        storage = next(key for key, names in self.parameters.items() if parameter in names)
        return self._phases.get(storage, set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        result = func(*args, **(kwargs or {}))
        depends = is_fixed = False
        for tensor in inputs:
            storage = storage_key(tensor)
            depends = depends or storage in self._dependent
            is_fixed = is_fixed or (self.phase == -1 and self.is_fixed(tensor))
            if storage in self.parameters:
                self._phases.setdefault(storage, set()).add(self.phase)
        if (depends or is_fixed) and not _uses_only_shape(func):
            for tensor in filter(_is_tensor, tree_leaves(result)):
                if depends:
                    self.depend(tensor)
                if is_fixed:
                    self._of_fixed[storage_key(tensor)] = tensor.untyped_storage()
        return result


def _uses_only_shape(func: Any) -> bool:
    name: str = func.overloadpacket.__name__
    return name.startswith("new_") or name.endswith("_like")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _own_parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _shape(name: str, runs: Sequence[Mapping[str, set[tuple[int, ...]]]]) -> tuple[Dim, ...]:
    """Return the dimensions of a module's output shape.

    Raises:
        _ImpassableError: The module returns no tensor, or tensors of several shapes.
    """
    shapes_per_run = [run.get(name, set()) for run in runs]
    if not any(shapes_per_run):
        return ()  # never called, so no shape is needed
    if any(len(shapes) != 1 or () in shapes for shapes in shapes_per_run):
        raise _ImpassableError(
            f"{name} is called before the blocks and returns more than one tensor"
        )
    first, second = (next(iter(shapes)) for shapes in shapes_per_run)
    dim_names = {
        tuple(sizes): dim
        for dim, sizes in zip(
            (BATCH, LENGTH, TOKENS), (*zip(*_SAMPLES, strict=True), _TOKENS), strict=True
        )
    }
    dims: list[Dim] = []
    for pair in zip(first, second, strict=True):
        dim = pair[0] if pair[0] == pair[1] else dim_names.get(pair)
        if dim is None:
            raise _ImpassableError(
                f"{name} returns a shape that depends on neither the batch size nor the length"
            )
        dims.append(dim)
    return tuple(dims)


_TOKENS = tuple(samples * tokens for samples, tokens in _SAMPLES)
