"""torch's fake tensors, and a memory of which operation makes which of them.

A step does in each block and micro-batch what it did in the one before. torch's own cache of that
spends most of its time on keys; this one asks for what decides the result and nothing else. What is
not wholly decided by the shapes, strides and types of an operation's tensors and by its other
arguments is left to torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from axonlaunch.models import fake_kernels
from axonlaunch.models.torch_internals import (
    OpOverload,
    bare_fake,
    dispatch_keys,
    storage_key,
    unset_fake_temporarily,
    without_modes,
)

_NAMESPACES = frozenset({"aten", "fsdp", "_c10d_functional"})
_WITHOUT_TENSORS = frozenset(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)
"""What FSDP, optimizers and pipelines mark their parts with."""
_DECIDED_OTHERWISE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_META = torch.device("meta")
_VALUES = frozenset(
    {
        *(bool, int, float, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class _Recipe(Protocol):
    """Makes an operation's result again."""

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        """Return it, from the operation's tensors."""


recipes: dict[Any, _Recipe | None] = {}
"""What has been worked out, by what decides it: None where it has to be each time."""
_repeatable: dict[Any, bool] = {}


def with_tensor_values() -> AbstractContextManager[Any]:
    """Return a context in which tensors have bytes again, inside that of ``fake_tensor_mode``.

    No other mode follows what is done in it either.
    """
    modes: AbstractContextManager[Any] = without_modes()
    return modes


def fake_tensor_mode() -> FakeTensorMode:
    """Return torch's fake mode, which takes tensors with values too, with a memory.

    It is of torch's very type, by which operators that run others find their rules.
    """
    fake_kernels.install_fake_kernels()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__torch_dispatch__ = MethodType(_Memory(), mode)  # type: ignore[method-assign]
    return mode


class _Memory:
    """One mode's."""

    def __init__(self) -> None:
        self._states: dict[torch.device, dict[str, Any]] = {}

    def __call__(
        self, mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take an operation's result from memory, or have the mode work it out."""
        named = kwargs or {}
        if func in _WITHOUT_TENSORS:
            return func(*args, **named)
        if func is torch.ops.aten.rand.default and not args[0]:
            return _likely_number(mode, named)
        key: list[Any] = [
            func.name(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
        ]
        tensors: list[Any] = []
        if not _is_repeatable(func, mode) or not _describe(mode, args, named, key, tensors):
            return FakeTensorMode.__torch_dispatch__(mode, func, types, args, named)
        asked = described = tuple(key)
        if described not in recipes and (overlap := _overlap(tensors)):
            asked = *described, overlap
        recipe = recipes.get(asked)
        if recipe is not None:
            return recipe.make(self, mode, tensors)
        result = FakeTensorMode.__torch_dispatch__(mode, func, types, args, named)
        if asked not in recipes:
            again: list[Any] = key[:3]
            _describe(mode, args, named, again, [])
            # What changes the shape of what it is given would have to do so again.
            same = tuple(again) == described
            recipes[asked] = self._recipe(mode, result, tensors) if same else None
        return result

    def fake(self, mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Any:
        """Return what ``FakeTensor(mode, meta, device)`` does, in a quarter of its time."""
        state = self._states.get(device)
        if state is None:
            made = FakeTensor(mode, meta, device)
            self._states[device] = dict(vars(made))
            return made
        made = bare_fake(meta, device)
        vars(made).update(state)
        return made

    def _recipe(self, mode: FakeTensorMode, result: Any, tensors: Sequence[Any]) -> _Recipe | None:
        """Return what makes another result like this one; None: it can't be determined."""
        if result is None:
            return _Nothing()
        if type(result) in (tuple, list):
            recipes = [self._recipe(mode, item, tensors) for item in result]
            made = [item for item in result if isinstance(item, FakeTensor)]
            fresh = [
                item.untyped_storage() for item in made if _sharing_tensor(item, tensors) is None
            ]
            if None in recipes or len({id(storage) for storage in fresh}) < len(fresh):
                return None
            return _Parts(type(result), [part for part in recipes if part is not None])
        if not isinstance(result, FakeTensor):
            return None
        for place, tensor in enumerate(tensors):
            if result is tensor:
                return _Given(place)
        if result.layout is not torch.strided or result.constant is not None:
            return None
        if result.requires_grad:
            return None
        recipe = _Made(
            _sharing_tensor(result, tensors),
            tuple(result.shape),
            result.stride(),
            int(result.storage_offset()),
            result.dtype,
            result.fake_device,
        )
        return recipe if _same(result, recipe.make(self, mode, tensors)) else None


@dataclass(frozen=True)
class _Nothing:
    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        del memory, mode, arguments


@dataclass(frozen=True)
class _Given:
    place: int

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        del memory, mode
        return arguments[self.place]


@dataclass(frozen=True)
class _Parts:
    kind: type
    parts: list[_Recipe]

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        return self.kind(part.make(memory, mode, arguments) for part in self.parts)


@dataclass(frozen=True)
class _Made:
    """A tensor in another one's storage, or in its own."""

    shared: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        if self.shared is None:
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
        else:
            made = torch.empty(0, dtype=self.dtype, device=_META)
            storage = arguments[self.shared].untyped_storage()
            made.set_(storage, self.offset, self.shape, self.stride)
        return memory.fake(mode, made, self.device)


def _likely_number(mode: FakeTensorMode, named: dict[str, Any]) -> Any:
    """Return a random number that has a value, by which code may branch.

    Blocks that are passed over now and then, as layerdrop does, are below it: none is.
    """
    with unset_fake_temporarily():
        number = torch.full((), 1 - 2**-24, dtype=named.get("dtype"), device=named.get("device"))
    return mode.fake_tensor_converter.from_real_tensor(mode, number, make_constant=True)


def _is_repeatable(func: Any, mode: FakeTensorMode) -> bool:
    known = _repeatable.get(func.name())
    if known is None:
        known = _repeatable[func.name()] = (
            isinstance(func, OpOverload)
            and func.namespace in _NAMESPACES
            and func not in mode.lift_fns
            and not any(tag in func.tags for tag in _DECIDED_OTHERWISE)
        )
    return known


def _describe(
    mode: FakeTensorMode, args: Any, named: dict[str, Any], key: list[Any], tensors: list[Any]
) -> bool:
    """Add what decides a result to a key, and the tensors among it; False: there is more."""
    if not _describe_each(mode, args, key, tensors):
        return False
    key.extend(named)
    return _describe_each(mode, named.values(), key, tensors)


def _describe_each(
    mode: FakeTensorMode, values: Iterable[Any], key: list[Any], tensors: list[Any]
) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None:
                return False
            if value.layout is not torch.strided or value.dtype.is_complex:
                return False
            key.append((value.shape, value.stride(), value.storage_offset()))
            key.append((value.dtype, value.fake_device))
            tensors.append(value)
        elif kind in _VALUES:
            key.append((kind, value))  # 1, 1.0 and True are equal
        elif kind is list or kind is tuple:
            key.append((kind, len(value)))
            if not _describe_each(mode, value, key, tensors):
                return False
        else:
            return False
    return True


def _overlap(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return which tensors are one, and which stand in one storage; nothing where none do.

    A result does not show whose place it took of several that could have been it.
    """
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    pairs = tuple(
        (objects.setdefault(id(tensor), n), storages.setdefault(storage_key(tensor), n))
        for n, tensor in enumerate(tensors)
    )
    return pairs if len(storages) < len(tensors) else ()


def _sharing_tensor(result: Tensor, tensors: Sequence[Tensor]) -> int | None:
    """Return which tensor's storage a result stands in."""
    storage = result.untyped_storage()
    return next(
        (n for n, tensor in enumerate(tensors) if tensor.untyped_storage() is storage), None
    )


def _same(result: FakeTensor, made: Any) -> bool:
    def describe(tensor: Any) -> Any:
        return (
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            tensor.is_neg(),
            dispatch_keys(tensor),
        )

    return bool(describe(result) == describe(made))


def silence_fake_tensors() -> None:
    """Let fake tensors raise alone: torch logs what it raises, too."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
