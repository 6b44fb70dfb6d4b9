"""torch's tensors without bytes, and a memory of which operation makes which of them.

A step does in each block and micro-batch what it did in the one before. torch's own cache of that
spends most of its time on keys; this one asks for what decides the result and nothing else. What is
not wholly decided by the shapes, strides and types of an operation's tensors and by its other
arguments is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_Recipe: TypeAlias = Callable[[FakeTensorMode, Sequence[Any]], Any]
"""Makes an operation's result again, in a mode, from its tensors."""

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
_VALUES = frozenset(
    {
        *(bool, int, float, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


_recipes: dict[Any, _Recipe | None] = {}
"""What has been worked out in this process: None where it has to be each time."""
_repeatable: dict[Any, bool] = {}


def tensors_without_bytes() -> FakeTensorMode:
    """Return torch's fake mode, which takes tensors with values too, with a memory.

    It is of torch's very type, by which operators that run others find their rules.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__torch_dispatch__ = MethodType(_dispatch, mode)  # type: ignore[method-assign]
    return mode


def _dispatch(
    mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Take an operation's result from memory, or have the mode work it out."""
    named = kwargs or {}
    if func in _WITHOUT_TENSORS:
        return func(*args, **named)
    key: list[Any] = [func, torch.is_inference_mode_enabled()]
    tensors: list[Any] = []
    if not _is_repeatable(func, mode) or not _describe(mode, args, named, key, tensors):
        return FakeTensorMode.__torch_dispatch__(mode, func, types, args, named)
    asked = tuple(key)
    recipe = _recipes.get(asked)
    if recipe is not None:
        return recipe(mode, tensors)
    result = FakeTensorMode.__torch_dispatch__(mode, func, types, args, named)
    if asked not in _recipes and not _overlap(tensors):
        again: list[Any] = key[:2]
        _describe(mode, args, named, again, [])
        # What changes the shape of what it is given would have to do so again.
        _recipes[asked] = _recipe(result, tensors) if tuple(again) == asked else None
    return result


def _is_repeatable(func: Any, mode: FakeTensorMode) -> bool:
    known = _repeatable.get(func)
    if known is None:
        known = _repeatable[func] = (
            isinstance(func, torch._ops.OpOverload)
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


def _recipe(result: Any, tensors: Sequence[Any]) -> _Recipe | None:
    """Return what makes another result like this one; None: it can't be told."""
    if result is None:
        return lambda mode, given: None
    if type(result) in (tuple, list):
        parts = [_recipe(one, tensors) for one in result]
        made = [one for one in result if isinstance(one, FakeTensor)]
        fresh = [one.untyped_storage() for one in made if _shared(one, tensors) is None]
        if None in parts or len({id(storage) for storage in fresh}) < len(fresh):
            return None
        kind = type(result)
        return lambda mode, given: kind(part(mode, given) for part in parts if part is not None)
    if not isinstance(result, FakeTensor):
        return None
    for place, tensor in enumerate(tensors):
        if result is tensor:
            return lambda mode, given: given[place]
    if result.layout is not torch.strided or result.constant is not None or result.requires_grad:
        return None
    shared = _shared(result, tensors)
    recipe = _fresh(result) if shared is None else _view(result, shared)
    return recipe if _same(result, recipe(result.fake_mode, tensors)) else None


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Say whether some stand in one storage, so that a result does not tell whose it took."""
    storages = [one.untyped_storage() for one in tensors]
    return len({id(storage) for storage in storages}) < len(storages)


def _shared(result: Tensor, tensors: Sequence[Tensor]) -> int | None:
    """Return which tensor's storage a result stands in."""
    storage = result.untyped_storage()
    return next((n for n, one in enumerate(tensors) if one.untyped_storage() is storage), None)


def _fresh(result: FakeTensor) -> _Recipe:
    shape, stride, dtype = result.shape, result.stride(), result.dtype
    device = result.fake_device

    def make(mode: FakeTensorMode, given: Sequence[Any]) -> Any:
        del given
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, empty, device)

    return make


def _view(result: FakeTensor, shared: int) -> _Recipe:
    shape, stride, dtype = result.shape, result.stride(), result.dtype
    offset, device = result.storage_offset(), result.fake_device

    def make(mode: FakeTensorMode, given: Sequence[Any]) -> Any:
        view = torch.empty(0, dtype=dtype, device="meta")
        view.set_(given[shared].untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, view, device)

    return make


def _same(result: FakeTensor, made: Any) -> bool:
    def told(tensor: Any) -> Any:
        return (
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            tensor.is_neg(),
            torch._C._dispatch_key_set(tensor),
        )

    return bool(told(result) == told(made))
