"""Statistics of what modules return and of its gradients, taken by hooks while a step runs.

It knows of no rank: what a rank sees of a tensor are so many elements, with their sums. Sums over
ranks make those of the whole tensor, and as each element is held as often as any other, replicas
change neither its root mean square nor its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from axonlaunch.diagnostics.module_trace.files import TracedKind, TracedTensor

_SHORT = 32
"""Elements of a row whose norm is not worth taking by itself."""

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

    def traced(self, key: TracedKey, *, factor: float = 1.0, size: int | None) -> TracedTensor:
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
        self._taken: list[tuple[TracedKey, int, tuple[Tensor, ...]]] = []
        self._last: tuple[Tensor, int] | None = None
        self._reduced: tuple[int, tuple[Tensor, ...]] = (0, ())

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
            self._last, self._reduced = seen, (local.numel(), _reduced(local.detach()))
        count, values = self._reduced
        if count:
            self._taken.append((key, count, values))

    def sums(self) -> dict[TracedKey, Sums]:
        """Return the sums so far, of all tensors of each key together."""
        self._last = None
        by_device: dict[torch.device, list[int]] = {}
        for place, (_, _, values) in enumerate(self._taken):
            by_device.setdefault(values[0].device, []).append(place)
        numbers: dict[int, list[float]] = {}
        for places in by_device.values():
            table = torch.stack([torch.stack(self._taken[place][2]) for place in places]).tolist()
            numbers.update(zip(places, table, strict=True))
        found: dict[TracedKey, Sums] = {}
        for place, (key, count, _) in enumerate(self._taken):
            norm, total, low, high = numbers[place]
            absmax = max(abs(low), abs(high))
            found.setdefault(key, Sums()).add(Sums(count, total, norm * norm, absmax))
        return found


class ModuleHooks:
    """Notes what modules return in training, and the gradients of it, until it is closed.

    Attributes:
        order: Modules in the order of their first calls.
        dtypes: Of what they returned.
        samples: Of a micro-batch. What is returned once for all of them, as positions are, gets a
            gradient that is a sum over them, which depends on how many they are: it is left out.
    """

    def __init__(self, statistics: Statistics, *, samples: int) -> None:
        self.order: dict[str, int] = {}
        self.dtypes: set[torch.dtype] = set()
        self.samples = samples
        self._statistics = statistics
        self._handles: list[Any] = []

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Hook modules.

        Args:
            modules: By their name in the whole model.
        """
        for name, module in modules:
            self._handles.append(module.register_forward_hook(self._noting(name)))

    def close(self) -> None:
        """Remove every hook of a module; those of gradients end with the backward."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _noting(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not (torch.is_grad_enabled() and module.training):
                return  # shapes are tried out
            for tensor in first_of_numbers(output):
                # In a backward it is computed again.
                if torch._C._current_graph_task_id() == -1:
                    self.order.setdefault(name, len(self.order))
                    self.dtypes.add(tensor.dtype)
                    self._statistics.add(("output", name), tensor)
                if tensor.requires_grad and tensor.ndim and tensor.shape[0] == self.samples:
                    tensor.register_hook(self._noting_gradient(name))

        return note

    def _noting_gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self._statistics.add(("output gradient", name), gradient)


def first_of_numbers(output: Any) -> Iterator[Tensor]:
    """Yield the first floating-point tensor of what a module returns, if there is one."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf
            return


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
    left = dict.fromkeys(names)
    for name in reversed(forward):
        yield "output gradient", name
        for parameter in [one for one in left if one.rpartition(".")[0] == name]:
            del left[parameter]
            yield "gradient", parameter
    for name in left:
        yield "gradient", name


def _reduced(local: Tensor) -> tuple[Tensor, ...]:
    """Return norm, sum, least and largest element, in fp32 or higher, 0-dim."""
    if not local.numel():
        return ()
    if local.dtype not in (torch.float32, torch.float64):
        local = local.float() if local.is_floating_point() else local.double()
    # Row by row: torch adds squares up in fp32, and is 8e-5 off for 4 million elements.
    if local.ndim > 1 and local.shape[-1] >= _SHORT:
        norm = torch.linalg.vector_norm(torch.linalg.vector_norm(local, dim=-1), dtype=torch.double)
    else:
        norm = torch.linalg.vector_norm(local, dtype=torch.double)
    low, high = local.aminmax()
    return norm, local.sum().double(), low.double(), high.double()
