"""Hooks that compute statistics of module outputs and of their gradients during a step.

This module does not depend on ranks: it counts and sums the local elements of a tensor. The caller
sums these over ranks. Replicas change neither the root mean square nor the mean, because every
element has the same number of replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from axonlaunch.comm.mesh import local_part
from axonlaunch.diagnostics.module_trace.files import TracedKind, TracedTensor
from axonlaunch.models.fake.output_regions import (
    first_floating,
    gets_partial_gradients,
    gives_partial_sums,
)
from axonlaunch.models.torch_internals import in_backward

_PIECE = 2**16
"""Elements of a piece: 256 KiB in fp32."""
_EXACT_IN_DOUBLE = (torch.float64, torch.int64, torch.int32)

TracedKey = tuple[TracedKind, str]


@dataclass
class Sums:
    """Sums over elements of a tensor.

    Attributes:
        count: Number of elements.
        total: Sum of the elements.
        squares: Sum of their squares.
        absmax: Largest absolute value.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    absmax: float = 0.0

    def add(self, other: Sums) -> None:
        """Add the sums of other elements."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.absmax = max(self.absmax, other.absmax)

    def to_traced(self, key: TracedKey, *, factor: float = 1.0, size: int | None) -> TracedTensor:
        """Return the record to write, with the elements multiplied by a factor.

        Args:
            key: Kind and name of the tensor.
            factor: Factor of the elements.
            size: Number of elements of a parameter or its gradient; None for other tensors.
        """
        rms, mean = math.sqrt(self.squares / self.count), self.total / self.count
        return TracedTensor(*key, rms * factor, mean * factor, self.absmax * factor, size)


class Statistics:
    """Sums of tensors by kind and name. Only reading the sums waits for the device."""

    def __init__(self) -> None:
        self._entries: list[tuple[TracedKey, Sums | _OnDevice]] = []
        self._last: tuple[Tensor, int] | None = None
        self._reduced: Sums | _OnDevice = Sums()

    def add(self, key: TracedKey, tensor: Tensor) -> None:
        """Add this rank's part of a tensor.

        If a module returns the output of its last submodule, the sums are computed only once.

        Args:
            key: Kind and name of the tensor.
            tensor: Plain tensor or DTensor with numeric elements.
        """
        # An in-place operation keeps the tensor object but changes its version.
        version = tensor, tensor._version
        if self._last is None or self._last[0] is not tensor or self._last[1] != version[1]:
            local = local_part(tensor)
            reduce = _sum_pieces if local.device.type == "cpu" else _OnDevice.of
            self._last, self._reduced = version, reduce(local.detach())
        self._entries.append((key, self._reduced))

    def sums(self) -> dict[TracedKey, Sums]:
        """Return the sums so far, over all tensors of each key."""
        self._last = None
        on_device = [entry for _, entry in self._entries if isinstance(entry, _OnDevice)]
        read = dict(zip(map(id, on_device), _OnDevice.read(on_device), strict=True))
        sums: dict[TracedKey, Sums] = {}
        for key, entry in self._entries:
            entry_sums = read[id(entry)] if isinstance(entry, _OnDevice) else entry
            if entry_sums.count:
                sums.setdefault(key, Sums()).add(entry_sums)
        return sums


@dataclass(frozen=True)
class _OnDevice:
    """A tensor's norm, sum, minimum and maximum as 0-dim tensors that may not be computed yet."""

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
    def read(entries: Sequence[_OnDevice]) -> Iterator[Sums]:
        """Yield the sums of each entry, after one copy to the host for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in (value for entry in entries for value in entry.values):
            by_dtype.setdefault(value.dtype, []).append(value)
        numbers = {dtype: iter(torch.stack(of).tolist()) for dtype, of in by_dtype.items()}
        for entry in entries:
            norm, total, low, high = (next(numbers[value.dtype]) for value in entry.values)
            yield Sums(entry.count, total, norm * norm, max(abs(low), abs(high)))


def _sum_pieces(local: Tensor) -> Sums:
    """Return the sums of a CPU tensor, computed in pieces that fit into a core's cache.

    torch sums squares in fp32 with a relative error of 8e-5 for 4 million elements. For a single
    piece the error is negligible.
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
    """Return a copy of the tensor on the host in fp32."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


class KeepCall(Protocol):
    """Keeps the elements of a module's output, or of its gradient, for one call."""

    def __call__(self, key: TracedKey, tensor: Tensor, *, number: int, module: nn.Module) -> None:
        """Keep the elements of one call."""


class ModuleHooks:
    """Records module outputs in training and the gradients of these outputs, until closed.

    Attributes:
        order: Position of each module in the order of first calls.
        dtypes: Types of the outputs.
        samples: Number of samples in a micro-batch. Gradients are recorded only for outputs with
            one row per sample. The gradient of an output shared by all samples, such as positions,
            is a sum over samples and depends on their number.
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
        """Register hooks on modules.

        Args:
            modules: Names in the whole model and modules.
        """
        for name, module in modules:
            self._handles.append(module.register_forward_hook(self._forward_hook(name)))

    def calls(self, name: str) -> int:
        """Return the number of calls of a module, without recomputation."""
        return self._calls[name, False]

    def close(self) -> None:
        """Remove all module hooks. Gradient hooks end with the backward."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not (torch.is_grad_enabled() and module.training):
                return  # a forward that only infers shapes
            tensor = first_floating(output)
            if tensor is None:
                return
            is_recomputed = in_backward()
            number = self._calls[name, is_recomputed]
            self._calls[name, is_recomputed] += 1
            if not is_recomputed:
                self.order.setdefault(name, len(self.order))
                self.dtypes.add(tensor.dtype)
                if not gives_partial_sums(module):
                    self._add(("output", name), tensor, number, module)
            if gets_partial_gradients(module):
                return
            if tensor.requires_grad and tensor.ndim and tensor.shape[0] == self.samples:
                key: TracedKey = ("output gradient", name)
                tensor.register_hook(lambda gradient: self._add(key, gradient, number, module))

        return record

    def _add(self, key: TracedKey, tensor: Tensor, number: int, module: nn.Module) -> None:
        self._statistics.add(key, tensor)
        if self._keep is not None:
            self._keep(key, tensor, number=number, module=module)


def in_order_of_computation(
    modules: Iterable[str], parameters: Iterable[str]
) -> Iterator[TracedKey]:
    """Yield the keys of all tensors of a step, from the batch to the first module's gradients.

    Args:
        modules: Names of modules in the order of their first calls.
        parameters: Names of all parameters.
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
