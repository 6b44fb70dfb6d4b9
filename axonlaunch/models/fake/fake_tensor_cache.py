"""Runs operations on torch's fake tensors with a cache of their results.

In each block and micro-batch, a step repeats the operations of the previous one. torch's cache for
fake tensors spends most of its time on computing keys; this cache uses only what determines the
result. Operations with results that depend on anything but the shapes, strides and dtypes of
tensors and the values of other arguments are passed on to torch.
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

from axonlaunch.models.fake import fake_kernels
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
"""Operations with which FSDP, optimizers and pipelines mark profiler ranges."""
_DECIDED_OTHERWISE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_VALUES = frozenset(
    {
        *(bool, int, float, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class _Recipe(Protocol):
    """Recreates the result of an operation."""

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        """Return the result, given the operation's tensor arguments."""


recipes: dict[Any, _Recipe | None] = {}
"""Cached recipes by key; None marks a key with a result that must be computed every time."""
_repeatable: dict[Any, bool] = {}


def with_tensor_values() -> AbstractContextManager[Any]:
    """Return a context within ``fake_tensor_mode`` in which tensors have values again.

    All other dispatch modes are disabled in it too.
    """
    modes: AbstractContextManager[Any] = without_modes()
    return modes


def fake_device(func: Any, args: Sequence[Any]) -> torch.device | None:
    """Return the device if an operation asks a fake tensor for it; more than half of all do."""
    if func is _DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def fake_tensor_mode() -> FakeTensorMode:
    """Return torch's fake tensor mode with a cache; it also accepts tensors with values.

    The mode has exactly torch's type, because higher-order operators look up their rules by it.
    """
    fake_kernels.install_fake_kernels()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # its keys cost more than most results
    mode.__torch_dispatch__ = MethodType(_Memory(), mode)  # type: ignore[method-assign]
    return mode


class _Memory:
    """Cache of one mode. Recipes are shared by all modes of the process."""

    def __init__(self) -> None:
        self._states: dict[torch.device, dict[str, Any]] = {}

    def __call__(
        self, mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return an operation's result from the cache, or let the mode compute it."""
        if (device := fake_device(func, args)) is not None:
            return device
        keywords = kwargs or {}
        if func in _WITHOUT_TENSORS:
            return func(*args, **keywords)
        if func is torch.ops.aten.rand.default and not args[0]:
            return _likely_number(mode, keywords)
        key: list[Any] = [
            func.name(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
        ]
        tensors: list[Any] = []
        if not _is_repeatable(func, mode) or not _describe(mode, args, keywords, key, tensors):
            return FakeTensorMode.__torch_dispatch__(mode, func, types, args, keywords)
        full_key = shape_key = tuple(key)
        if shape_key not in recipes and (overlap := _overlap(tensors)):
            full_key = *shape_key, overlap
        recipe = recipes.get(full_key)
        if recipe is not None:
            return recipe.make(self, mode, tensors)
        result = FakeTensorMode.__torch_dispatch__(mode, func, types, args, keywords)
        if full_key not in recipes:
            key_afterwards: list[Any] = key[:3]
            _describe(mode, args, keywords, key_afterwards, [])
            # An operation that changes the shape of an argument must run each time.
            is_unchanged = tuple(key_afterwards) == shape_key
            recipes[full_key] = self._recipe(mode, result, tensors) if is_unchanged else None
        return result

    def fake(self, mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Any:
        """Return the same as ``FakeTensor(mode, meta, device)``, in a quarter of its time."""
        state = self._states.get(device)
        if state is None:
            fake = FakeTensor(mode, meta, device)
            self._states[device] = dict(vars(fake))
            return fake
        fake = bare_fake(meta, device)
        vars(fake).update(state)
        return fake

    def _recipe(self, mode: FakeTensorMode, result: Any, tensors: Sequence[Any]) -> _Recipe | None:
        """Return a recipe for results like this one, or None."""
        if result is None:
            return _Nothing()
        if isinstance(result, tuple | list):
            recipes = [self._recipe(mode, item, tensors) for item in result]
            fakes = [item for item in result if isinstance(item, FakeTensor)]
            new_storages = [
                item.untyped_storage() for item in fakes if _sharing_tensor(item, tensors) is None
            ]
            if None in recipes or len({id(storage) for storage in new_storages}) < len(
                new_storages
            ):
                return None
            # Decompositions return named tuples, which torch takes like others.
            kind = list if type(result) is list else tuple
            return _Parts(kind, [part for part in recipes if part is not None])
        if not isinstance(result, FakeTensor):
            return None
        for index, tensor in enumerate(tensors):
            if result is tensor:
                return _Given(index)
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
    index: int

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        del memory, mode
        return arguments[self.index]


@dataclass(frozen=True)
class _Parts:
    kind: type
    parts: list[_Recipe]

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        return self.kind(part.make(memory, mode, arguments) for part in self.parts)


@dataclass(frozen=True)
class _Made:
    """A tensor that shares the storage of an argument or has a new storage."""

    shared: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def make(self, memory: _Memory, mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        if self.shared is None:
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
        else:
            meta = torch.empty(0, dtype=self.dtype, device=_META)
            storage = arguments[self.shared].untyped_storage()
            meta.set_(storage, self.offset, self.shape, self.stride)
        return memory.fake(mode, meta, self.device)


def _likely_number(mode: FakeTensorMode, keywords: dict[str, Any]) -> Any:
    """Return a constant just below 1 in place of a random number, so that code can branch on it.

    Layerdrop, which skips a block if the number is below a threshold, then skips none.
    """
    with unset_fake_temporarily():
        number = torch.full(
            (), 1 - 2**-24, dtype=keywords.get("dtype"), device=keywords.get("device")
        )
    return mode.fake_tensor_converter.from_real_tensor(mode, number, make_constant=True)


def _is_repeatable(func: Any, mode: FakeTensorMode) -> bool:
    is_repeatable = _repeatable.get(func.name())
    if is_repeatable is None:
        is_repeatable = _repeatable[func.name()] = (
            isinstance(func, OpOverload)
            and func.namespace in _NAMESPACES
            and func not in mode.lift_fns
            and not any(tag in func.tags for tag in _DECIDED_OTHERWISE)
        )
    return is_repeatable


def _describe(
    mode: FakeTensorMode, args: Any, keywords: dict[str, Any], key: list[Any], tensors: list[Any]
) -> bool:
    """Add everything that determines a result to a key, and the tensors to a list.

    Returns:
        False if the result depends on something else too.
    """
    if not _describe_each(mode, args, key, tensors):
        return False
    key.extend(keywords)
    return _describe_each(mode, keywords.values(), key, tensors)


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
    """Return which tensors are identical and which share a storage; empty if none do.

    This is part of the key, because a result that shares a storage does not show which of several
    arguments it was made from.
    """
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    pairs = tuple(
        (objects.setdefault(id(tensor), n), storages.setdefault(storage_key(tensor), n))
        for n, tensor in enumerate(tensors)
    )
    return pairs if len(storages) < len(tensors) else ()


def _sharing_tensor(result: Tensor, tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the tensor that shares a result's storage."""
    storage = result.untyped_storage()
    return next(
        (n for n, tensor in enumerate(tensors) if tensor.untyped_storage() is storage), None
    )


def _same(result: FakeTensor, remade: Any) -> bool:
    def describe(tensor: Any) -> Any:
        return (
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            tensor.is_neg(),
            dispatch_keys(tensor),
        )

    return bool(describe(result) == describe(remade))


def silence_fake_tensors() -> None:
    """Turn off the log of errors in fake tensors, because torch also raises them."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
