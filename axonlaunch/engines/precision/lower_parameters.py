"""Computes in bf16 with full parameters kept in fp32, like fully_shard's mixed precision policy.

A forward reads copies of its parameters in the lower type; their gradients arrive in fp32. Weights,
inputs and activations between layers have the lower type, as with sharded parameters. Under torch's
autocast, norms and the residual sum over blocks would be in fp32, which doubles the bytes saved for
backward and passed between stages.

Source: PyTorch, ``torch.distributed.fsdp.MixedPrecisionPolicy``, which torchtitan also uses on one
device.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from axonlaunch.models.modules.convert_module import convert_module
from axonlaunch.models.tensors.dtensor_regions import dtensor_of
from axonlaunch.models.torch_internals import RunningNorm, local_tensor

Forward = Callable[..., Any]
_Key = TypeVar("_Key")


def lower_blocks(
    model: nn.Module, dtype: torch.dtype, *, blocks: Sequence[nn.Module]
) -> Callable[[Forward], Forward]:
    """Make the modules of a model or pipeline stage compute in a lower type, in place.

    Names, parameters and attributes do not change. Call this before blocks are compiled or wrapped
    for recomputation.

    Args:
        model: The model, with full parameters or parameters sharded over a tensor axis.
        dtype: The lower type.
        blocks: Modules whose inputs are cast, as fully_shard casts the inputs of its units, because
            the model may have promoted them.

    Returns:
        A wrapper for the model's forward; apply it outermost.
    """
    arithmetic = _Arithmetic(dtype)
    uses = Counter(p for module in model.modules() for p in _castable_parameters(module).values())
    shared = [parameter for parameter, count in uses.items() if count > 1]
    for module in model.modules():
        parameters = _castable_parameters(module)
        is_tied = any(parameter is other for parameter in parameters.values() for other in shared)
        if is_tied or any(parameter.dtype != dtype for parameter in parameters.values()):
            lower = convert_module(module, _Lower)
            lower._arithmetic = arithmetic
            # Identified by number, because initializing a model on meta replaces its parameters.
            lower._shared = {
                name: number
                for name, parameter in parameters.items()
                for number, other in enumerate(shared)
                if parameter is other
            }
    for block in blocks:
        block.forward = arithmetic.computing(block.forward)
    return arithmetic.computing


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module has running statistics.

    torch requires that its parameters have the type of the statistics.
    """
    return isinstance(module, RunningNorm) and module.running_mean is not None


def reading_lower(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a module's parameters are read in the type of its forward."""
    return module._arithmetic.reading() if isinstance(module, _Lower) else nullcontext()


class _Arithmetic:
    """The type in which a model computes, shared by all of its modules.

    Attributes:
        computes: Whether a forward of the model is running, in which modules read copies.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.computes = False
        self._dtype = dtype
        self._reader: nn.Module | None = None
        self._copies: dict[tuple[str, type[Tensor], bool], Tensor] = {}
        self._shared_copies: dict[tuple[int, type[Tensor], bool], Tensor] = {}

    def computing(self, forward: Forward) -> Forward:
        """Wrap a forward: cast its floating-point inputs, read parameters in the lower type."""

        @functools.wraps(forward)
        def compute(*inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = tree_map_only(Tensor, self._cast, (inputs, kwargs))
            if self.computes:
                return forward(*inputs, **kwargs)
            with self.reading():
                return forward(*inputs, **kwargs)

        return compute

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which parameters are read in the lower type."""
        self.computes = True
        try:
            yield
        finally:
            self.computes, self._reader = False, None
            self._copies.clear()
            self._shared_copies.clear()

    def copy(self, value: Tensor, name: str, reader: _Lower) -> Tensor:
        """Return the copy of a parameter that a forward computes with.

        A parameter used by several modules has one copy per forward, as when it is gathered: its
        gradients are summed in the lower type. Other copies are kept until another module reads,
        because experts read a parameter once for each expert.

        Args:
            value: The parameter, or this rank's part of it.
            name: Name of the parameter in the module.
        """
        # Copies made with gradients disabled cannot be used with gradients enabled.
        kind = type(value), torch.is_grad_enabled()
        if (number := reader._shared.get(name)) is not None:
            return self._keep_copy(value, self._shared_copies, (number, *kind))
        if value.dtype == self._dtype:
            return value
        if torch.compiler.is_compiling():
            return self._cast(value)  # a graph merges equal casts
        if reader is not self._reader:
            self._reader = reader
            self._copies.clear()
        return self._keep_copy(value, self._copies, (name, *kind))

    def _keep_copy(self, value: Tensor, copies: dict[_Key, Tensor], key: _Key) -> Tensor:
        if key not in copies:
            copies[key] = self._alias(value) if value.dtype == self._dtype else self._cast(value)
        return copies[key]

    def _alias(self, value: Tensor) -> Tensor:
        """Return a view, in which gradients are summed in the lower type before ``grad_dtype``."""
        if isinstance(value, DTensor) and not torch.compiler.is_compiling():
            alias: Tensor = _cast_part(value, self._dtype)
            return alias
        return value.view_as(value)

    def _cast(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        if isinstance(tensor, DTensor) and not torch.compiler.is_compiling():
            lower: Tensor = _cast_part(tensor, self._dtype)
            return lower
        return tensor.to(self._dtype)


class _CastPart(torch.autograd.Function):
    """Casts a DTensor in a fraction of the time of its dispatched ``to``."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return _cast_local(dtype, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        return _cast_local(ctx.dtype, gradient), None


_cast_part: Any = _CastPart.apply


def _cast_local(dtype: torch.dtype, tensor: DTensor) -> DTensor:
    local, (mesh, placements) = (
        local_tensor(tensor).to(dtype),
        (tensor.device_mesh, tensor.placements),
    )
    return dtensor_of(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())


class _Lower(nn.Module):
    """Mixin before a module's class that gives its forward copies of its parameters."""

    _arithmetic: _Arithmetic
    _shared: dict[str, int]

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if self._arithmetic.computes and self.__dict__["_parameters"].get(name) is not None:
            return self._arithmetic.copy(value, name, self)
        return value


def _castable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's direct floating-point parameters that can be read in a lower type."""
    if has_statistics(module):
        return {}  # for any type of input
    named = module._parameters.items()
    return {name: p for name, p in named if p is not None and p.is_floating_point()}
