"""Statistics of what modules return and of its gradients, taken by hooks while a step runs.

It knows of no rank: what a rank sees of a tensor are so many elements, with their sums. Sums over
ranks make those of the whole tensor, and as each element is held as often as any other, replicas
change neither its root mean square nor its mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from axonlaunch.diagnostics.module_trace.files import TracedKind, TracedTensor
from axonlaunch.models.output_regions import (
    first_floating,
    gets_partial_gradients,
    gives_partial_sums,
)
from axonlaunch.models.torch_internals import in_backward

_PIECE = 2**16
"""Elements: 256 KiB of fp32."""
_EXACT_IN_DOUBLE = (torch.float64, torch.int64, torch.int32)

TracedKey = tuple[TracedKind, str]


@dataclass
class Sums:
    """What elements of a tensor come to.

    Attributes:
        count: Elements.
        total: Their sum.
        squares: The sum of their squares.
        absmax: The largest absolute value.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    absmax: float = 0.0

    def add(self, other: Sums) -> None:
        """Take more elements in."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.absmax = max(self.absmax, other.absmax)

    def to_traced(self, key: TracedKey, *, factor: float = 1.0, size: int | None) -> TracedTensor:
        """Return what is written of the elements times a factor.

        Args:
            key: Whose they are.
            factor: Of the elements.
            size: Of a parameter or its gradient; None for others.
        """
        rms, mean = math.sqrt(self.squares / self.count), self.total / self.count
        return TracedTensor(*key, rms * factor, mean * factor, self.absmax * factor, size)


class Statistics:
    """Sums of tensors by kind and name; a device is waited for once, when they are read."""

    def __init__(self) -> None:
        self._taken: list[tuple[TracedKey, Sums | _OnDevice]] = []
        self._last: tuple[Tensor, int] | None = None
        self._reduced: Sums | _OnDevice = Sums()

    def add(self, key: TracedKey, tensor: Tensor) -> None:
        """Take what this rank holds of a tensor in.

        A module that returns what its last part returned has the same numbers; they are taken once.

        Args:
            key: Whose it is.
            tensor: Of numbers, plain or a DTensor.
        """
        seen = tensor, tensor._version  # an operation in place leaves the object and not the values
        if self._last is None or self._last[0] is not tensor or self._last[1] != seen[1]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            reduce = _sum_pieces if local.device.type == "cpu" else _OnDevice.of
            self._last, self._reduced = seen, reduce(local.detach())
        self._taken.append((key, self._reduced))

    def sums(self) -> dict[TracedKey, Sums]:
        """Return the sums so far, of all tensors of each key together."""
        self._last = None
        on_device = [taken for _, taken in self._taken if isinstance(taken, _OnDevice)]
        read = dict(zip(map(id, on_device), _OnDevice.read(on_device), strict=True))
        sums: dict[TracedKey, Sums] = {}
        for key, taken in self._taken:
            known = read[id(taken)] if isinstance(taken, _OnDevice) else taken
            if known.count:
                sums.setdefault(key, Sums()).add(known)
        return sums


@dataclass(frozen=True)
class _OnDevice:
    """A tensor's norm, sum, least and largest element, each of no dim, which nobody waited for."""

    count: int
    values: tuple[Tensor, ...]

    @classmethod
    def of(cls, local: Tensor) -> _OnDevice:
        if not local.numel():
            return cls(0, (torch.zeros((), device=local.device),) * 4)
        precision = torch.double if local.dtype in _EXACT_IN_DOUBLE else torch.float
        norm = torch.linalg.vector_norm(local, dtype=precision)
        return cls(local.numel(), (norm, local.sum(dtype=precision), *local.aminmax()))

    @staticmethod
    def read(all_of: Sequence[_OnDevice]) -> Iterator[Sums]:
        """Yield the sums of each, after one copy to the host for each type of numbers."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in (value for one in all_of for value in one.values):
            by_dtype.setdefault(value.dtype, []).append(value)
        numbers = {dtype: iter(torch.stack(of).tolist()) for dtype, of in by_dtype.items()}
        for one in all_of:
            norm, total, low, high = (next(numbers[value.dtype]) for value in one.values)
            yield Sums(one.count, total, norm * norm, max(abs(low), abs(high)))


def _sum_pieces(local: Tensor) -> Sums:
    """Return the sums of a tensor of the host, by pieces that a core's cache holds.

    torch adds squares up in fp32, and is 8e-5 off for 4 million elements; it is not for a piece.
    """
    flat = local.reshape(-1)
    total = squares = absmax = 0.0
    for piece in flat.split(_PIECE) if len(flat) > _PIECE else (flat,) if len(flat) else ():
        exact = piece.double() if piece.dtype in _EXACT_IN_DOUBLE else piece.float()
        squares += torch.dot(exact, exact).item()
        total += exact.sum().item()
        absmax = max(absmax, exact.amax().item(), -exact.amin().item())
    return Sums(len(flat), total, squares, absmax)


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy of all elements, on the host and in fp32."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


class KeepCall(Protocol):
    """Keeps the elements of what a module returned, or of its gradient, in one of its calls."""

    def __call__(self, key: TracedKey, tensor: Tensor, *, number: int, module: nn.Module) -> None:
        """Keep those of one call."""


class ModuleHooks:
    """Notes what modules return in training, and the gradients of it, until it is closed.

    Attributes:
        order: Modules in the order of their first calls.
        dtypes: Of what they returned.
        samples: Of a micro-batch. What is returned once for all of them, as positions are, gets a
            gradient that is a sum over them, which depends on how many they are: it is left out.
    """

    def __init__(
        self, statistics: Statistics, *, samples: int, keep: KeepCall | None = None
    ) -> None:
        self.order: dict[str, int] = {}
        self.dtypes: set[torch.dtype] = set()
        self.samples = samples
        self._statistics = statistics
        self._keep = keep
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._handles: list[Any] = []

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Hook modules.

        Args:
            modules: By their name in the whole model.
        """
        for name, module in modules:
            self._handles.append(module.register_forward_hook(self._noting(name)))

    def calls(self, name: str) -> int:
        """Return how often a module was called, recomputation apart."""
        return self._calls[name, False]

    def close(self) -> None:
        """Remove every hook of a module; those of gradients end with the backward."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _noting(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not (torch.is_grad_enabled() and module.training):
                return  # shapes are tried out
            tensor = first_floating(output)
            if tensor is None:
                return
            # In a backward it is computed again.
            is_again = in_backward()
            number = self._calls[name, is_again]
            self._calls[name, is_again] += 1
            if not is_again:
                self.order.setdefault(name, len(self.order))
                self.dtypes.add(tensor.dtype)
                if not gives_partial_sums(module):
                    self._add(("output", name), tensor, number, module)
            if gets_partial_gradients(module):
                return
            if tensor.requires_grad and tensor.ndim and tensor.shape[0] == self.samples:
                key: TracedKey = ("output gradient", name)
                tensor.register_hook(lambda gradient: self._add(key, gradient, number, module))

        return note

    def _add(self, key: TracedKey, tensor: Tensor, number: int, module: nn.Module) -> None:
        self._statistics.add(key, tensor)
        if self._keep is not None:
            self._keep(key, tensor, number=number, module=module)


def in_order_of_computation(
    modules: Iterable[str], parameters: Iterable[str]
) -> Iterator[TracedKey]:
    """Yield what a step may have, from the batch to the gradients of the first module.

    Args:
        modules: In the order of their first calls.
        parameters: All names.
    """
    yield from (("batch", "inputs"), ("batch", "targets"))
    names, forward = [*parameters], [*modules]
    for name in names:
        yield "parameter", name
    for name in forward:
        yield "output", name
    yield "loss", ""
    of_module: dict[str, list[str]] = {}
    for name in names:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    for name in reversed(forward):
        yield "output gradient", name
        for parameter in of_module.get(name, []):
            yield "gradient", parameter
    called = {*forward}
    for name in names:
        if name.rpartition(".")[0] not in called:
            yield "gradient", name
