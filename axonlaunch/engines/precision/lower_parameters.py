"""Whole parameters that are kept in fp32 and computed with in bf16, as fully_shard's policy does.

A forward reads copies of its parameters in the lower type, whose gradients arrive in fp32: weights,
inputs and what passes between layers are in the lower type, as they are where parameters are
sharded. Under torch's autocast norms and the sum over blocks would be in fp32, twice the bytes of
what blocks keep for backward and stages pass on.

Source: PyTorch, ``torch.distributed.fsdp.MixedPrecisionPolicy``, which torchtitan uses on one
device too.
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

from axonlaunch.models.convert_module import convert_module
from axonlaunch.models.dtensor_regions import dtensor_of
from axonlaunch.models.torch_internals import RunningNorm, local_tensor

Forward = Callable[..., Any]
_Key = TypeVar("_Key")


def lower_blocks(
    model: nn.Module, dtype: torch.dtype, *, blocks: Sequence[nn.Module]
) -> Callable[[Forward], Forward]:
    """Let the modules of a model, or of a stage of one, compute in a lower type, in place.

    They keep names, parameters and attributes. What recomputes or compiles a block comes after it.

    Args:
        model: Its parameters are whole, or divided over a tensor axis.
        dtype: The type.
        blocks: Whose inputs are cast, as fully_shard casts those of its units: a model may have
            lifted them.

    Returns:
        What the model's own forward is to be wrapped by, around all that is done to it.
    """
    arithmetic = _Arithmetic(dtype)
    owners = Counter(p for module in model.modules() for p in _own(module).values())
    shared = [parameter for parameter, count in owners.items() if count > 1]
    for module in model.modules():
        own = _own(module)
        if any(parameter.dtype != dtype for parameter in own.values()):
            lower = convert_module(module, _Lower)
            lower._arithmetic = arithmetic
            # By number, for what fills a model on meta gives it other parameters.
            lower._shared = {
                name: number
                for name, parameter in own.items()
                for number, other in enumerate(shared)
                if parameter is other
            }
    for block in blocks:
        block.forward = arithmetic.computing(block.forward)
    return arithmetic.computing


def has_statistics(module: nn.Module) -> bool:
    """Say whether a module has running statistics, in whose type torch takes its parameters."""
    return isinstance(module, RunningNorm) and module.running_mean is not None


def reading_lower(module: nn.Module) -> AbstractContextManager[None]:
    """Let a module's parameters be read inside as its forward reads them."""
    return module._arithmetic.reading() if isinstance(module, _Lower) else nullcontext()


class _Arithmetic:
    """The type in which a model computes, as all of its modules see it.

    Attributes:
        computes: Whether a forward of the model runs now, so that its modules read copies.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.computes = False
        self._dtype = dtype
        self._reader: nn.Module | None = None
        self._copies: dict[tuple[str, type[Tensor], bool], Tensor] = {}
        self._shared_copies: dict[tuple[int, type[Tensor], bool], Tensor] = {}

    def computing(self, forward: Forward) -> Forward:
        """Return a forward that takes its floating-point inputs, and reads parameters, so."""

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
        """Let parameters be read in the lower type inside."""
        self.computes = True
        try:
            yield
        finally:
            self.computes, self._reader = False, None
            self._copies.clear()
            self._shared_copies.clear()

    def copy(self, value: Tensor, name: str, reader: _Lower) -> Tensor:
        """Return what a forward computes with in a parameter's place.

        Of one that several modules use there is one copy in a forward, as there is where it is
        gathered: its gradients add up in the lower type. Experts read theirs once for each: until
        another module reads, that is one copy too.

        Args:
            value: The parameter, or this rank's part of it.
            name: Its name in the module.
            reader: The module.
        """
        # A copy made where gradients are off has none to pass on.
        kind = type(value), torch.is_grad_enabled()
        if (number := reader._shared.get(name)) is not None:
            return self._keep_copy(value, self._shared_copies, (number, *kind))
        if torch.compiler.is_compiling():
            return self._cast(value)  # a graph joins equal casts itself
        if reader is not self._reader:
            self._reader = reader
            self._copies.clear()
        return self._keep_copy(value, self._copies, (name, *kind))

    def _keep_copy(self, value: Tensor, copies: dict[_Key, Tensor], key: _Key) -> Tensor:
        if key not in copies:
            copies[key] = self._cast(value)
        return copies[key]

    def _cast(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        if isinstance(tensor, DTensor) and not torch.compiler.is_compiling():
            lower: Tensor = _cast_part(tensor, self._dtype)
            return lower
        return tensor.to(self._dtype)


class _CastPart(torch.autograd.Function):
    """``to`` of a DTensor in a fraction of the time that its dispatch takes."""

    @staticmethod
    def forward(ctx: Any, whole: DTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = whole.dtype
        return _with_part_in(dtype, whole)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        return _with_part_in(ctx.dtype, gradient), None


_cast_part: Any = _CastPart.apply


def _with_part_in(dtype: torch.dtype, whole: DTensor) -> DTensor:
    part, (mesh, placements) = local_tensor(whole).to(dtype), (whole.device_mesh, whole.placements)
    return dtensor_of(part, mesh, placements, shape=whole.shape, stride=whole.stride())


class _Lower(nn.Module):
    """Comes before a module's own class and gives its forward copies of its parameters."""

    _arithmetic: _Arithmetic
    _shared: dict[str, int]

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if self._arithmetic.computes and self.__dict__["_parameters"].get(name) is not None:
            return self._arithmetic.copy(value, name, self)
        return value


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own floating-point parameters that its forward may read in a lower type."""
    if has_statistics(module):
        return {}  # whatever the input's type
    named = module._parameters.items()
    return {name: p for name, p in named if p is not None and p.is_floating_point()}
