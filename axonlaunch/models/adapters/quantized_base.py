"""Quantizes the frozen weights that an adapter is trained on (QLoRA).

Quantized are the weights of linear layers, except the head and those that are trained, and packed
experts. If the files of pretrained weights are quantized, those that are quantized there are. They
keep their names. A module reads values: each read dequantizes this rank's part.

Autograd would keep dequantized weights for backward. In a forward that is wrapped with
``recomputing_weights``, it keeps the quantized weights, and backward dequantizes them again.

Source: Dettmers et al., "QLoRA", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from axonlaunch.config import ConfigIssue
from axonlaunch.config.axes import LAYER_AXES
from axonlaunch.models.modules.convert_module import convert_module
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.packed_blocks import (
    BLOCK,
    BLOCK_FORMATS,
    BlockFormat,
    format_of,
    library_problem,
    logical_shape,
)
from axonlaunch.models.torch_internals import storage_key


class QuantizedWeights(nn.Module):
    """Mixin before a module's class that lets its code read values of quantized parameters.

    Parameters that are sharded over data-parallel ranks are returned unchanged: nothing computes
    with them before they are gathered, and fully_shard reads them.

    Example: ``layer.weight`` of a quantized ``nn.Linear(128, 6)`` has the shape [6, 128]. The
    parameter, in ``named_parameters``, has the shape [6, 2, 36] in nf4.

    Attributes:
        read_dtype: Dtype of the values.
    """

    read_dtype: torch.dtype = torch.float32

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if not isinstance(value, Tensor) or (block_format := format_of(value)) is None:
            return value
        axes = (value.device_mesh.mesh_dim_names or ()) if isinstance(value, DTensor) else ()
        if not {*axes} <= {*LAYER_AXES}:
            return value
        scope = None if torch.compiler.is_compiling() else _SCOPE.get()
        if scope is None:
            return block_format.dequantize(value, self.read_dtype)
        return scope.read(_Source(value, block_format, self.read_dtype), (self, name))


@dataclass(frozen=True)
class _Source:
    """A quantized tensor and how it is read."""

    packed: Tensor
    block_format: BlockFormat
    dtype: torch.dtype

    def values(self) -> Tensor:
        return self.block_format.dequantize(self.packed, self.dtype)


@dataclass(frozen=True)
class _Recomputed:
    """View of dequantized values, which autograd computes again instead of storing them."""

    source: _Source
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.source.values().as_strided(self.shape, self.stride, self.offset)


class _Scope:
    """The values that a forward has read."""

    def __init__(self) -> None:
        # A weak reference keeps the number of a storage from being used for another one.
        self._sources: dict[int, tuple[StorageWeakRef, _Source]] = {}
        self._last: tuple[Any, Tensor] | None = None

    def read(self, source: _Source, key: tuple[nn.Module, str]) -> Tensor:
        """Return values; those of the last read are kept, as experts read once per expert."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None  # freed before others are allocated
        values = source.values()
        self._last = key, values
        self._sources[storage_key(values)] = StorageWeakRef(values.untyped_storage()), source
        return values

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of a tensor."""
        if (found := self._sources.get(storage_key(tensor))) is None:
            return tensor
        shape, stride = tuple(tensor.shape), tensor.stride()
        return _Recomputed(found[1], shape, stride, int(tensor.storage_offset()))

    def clear(self) -> None:
        """Free the values of the last read."""
        self._last = None
        self._sources.clear()


_SCOPE: ContextVar[_Scope | None] = ContextVar("quantized weights that were read", default=None)


def _unpack(kept: Any) -> Tensor:
    tensor: Tensor = kept.tensor() if isinstance(kept, _Recomputed) else kept
    return tensor


def recomputing_weights(
    forward: Callable[..., Any], *, is_checkpointed: bool = False
) -> Callable[..., Any]:
    """Wrap a block's forward so that backward dequantizes weights again.

    Args:
        forward: Forward of the block.
        is_checkpointed: Whether activation checkpointing runs this forward again in backward. Then
            it decides what is saved, as the innermost hooks of saved tensors do; the recomputed
            forward keeps the values of one block.
    """

    @functools.wraps(forward)
    def compute(*inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*inputs, **kwargs)
        scope = _Scope()
        token = _SCOPE.set(scope)
        hooks = nullcontext() if is_checkpointed else saved_tensors_hooks(scope.pack, _unpack)
        try:
            with hooks:
                return forward(*inputs, **kwargs)
        finally:
            _SCOPE.reset(token)
            scope.clear()  # autograd keeps its method, too

    return compute


def quantize_base(
    module: nn.Module, base: str, spec: ModelSpec, *, layers: dict[str, nn.Module]
) -> None:
    """Quantize the frozen weights of an unsharded model in place.

    Weights with rows that are not whole blocks are left as they are; ``base_problems`` names them.

    Args:
        module: Model with adapters. On ``meta``, the quantized weights have no values either.
        base: Value of ``adapter.base``.
        spec: Spec of the model.
        layers: Linear layers that can be adapted, by name.
    """
    block_format = BLOCK_FORMATS[base]
    for owner, key, _ in _weights(module, spec, layers):
        weight = owner._parameters[key]
        assert weight is not None
        if weight.shape[-1] % BLOCK == 0:
            packed = block_format.quantize(weight.detach())
            owner._parameters[key] = nn.Parameter(packed, requires_grad=False)
            if not isinstance(owner, QuantizedWeights):
                convert_module(owner, QuantizedWeights)


def base_problems(
    module: nn.Module, base: str, spec: ModelSpec, *, layers: dict[str, nn.Module]
) -> Iterator[ConfigIssue]:
    """Yield why the base can't be quantized: a missing package, and the first unsuitable weight.

    Args:
        module: Model after ``quantize_base``.
        base: Value of ``adapter.base``.
        spec: Spec of the model.
        layers: Linear layers that can be adapted, by name.
    """
    if base == "nf4" and (message := library_problem()):
        yield ConfigIssue("adapter.base", message, base)
    for _, key, name in _weights(module, spec, layers):
        weight = dict(module.named_parameters(remove_duplicate=False))[f"{name}.{key}"]
        message = (
            f"{name}.{key} has rows of {weight.shape[-1]} values, not whole blocks of {BLOCK}; "
            "use null"
        )
        yield ConfigIssue("adapter.base", message, base)
        return


def quantized_names(module: nn.Module) -> dict[str, BlockFormat]:
    """Return the formats of a module's quantized parameters by name."""
    return {
        name: block_format
        for name, parameter in module.named_parameters()
        if (block_format := format_of(parameter)) is not None
    }


def read_values_in(module: nn.Module, dtype: torch.dtype) -> bool:
    """Let the modules of a model read quantized weights in a dtype; return whether there are any.

    Args:
        module: Model or pipeline stage.
        dtype: Dtype of the computation.
    """
    quantized = [part for part in module.modules() if isinstance(part, QuantizedWeights)]
    for part in quantized:
        part.read_dtype = dtype
    return bool(quantized)


def _weights(
    module: nn.Module, spec: ModelSpec, layers: dict[str, nn.Module]
) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield the weights to quantize that are not quantized yet: module, key, name of the module."""
    last = () if spec.head is not None or spec.ends is None else spec.ends[1]
    owners = [
        (layer, "weight", name)
        for name, layer in layers.items()
        if not any(f"{name}.".startswith(f"{end}.") for end in last)
    ]
    modules = dict(module.named_modules())
    for name in spec.experts(module):
        experts = modules[name]
        owners += [
            (experts, key, name)
            for key, weight in experts._parameters.items()
            if weight is not None and len(logical_shape(weight)) == 3
        ]
    for owner, key, name in owners:
        weight = owner._parameters[key]
        if name in spec.unquantized:
            continue
        if weight is not None and format_of(weight) is None and not weight.requires_grad:
            yield owner, key, name
