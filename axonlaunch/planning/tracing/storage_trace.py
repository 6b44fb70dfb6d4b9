"""Traces all live storages of one thread by category, with current bytes and peaks.

Real and fake tensors are both supported. The trace counts the results of torch's operations and the
known temporary buffers of their kernels. It does not count rounding by an allocator.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from axonlaunch.comm.torch_internals import AsyncCollectiveTensor
from axonlaunch.models.fake.fake_tensor_cache import fake_device
from axonlaunch.models.tensors import host_memory
from axonlaunch.models.torch_internals import in_backward, local_tensor
from axonlaunch.planning.tracing.devices import gloo_buffers
from axonlaunch.planning.tracing.dispatch_mode import UncompiledDispatchMode

Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "communication", "temporary"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
_OFFLOADED: Any = "offloaded"
"""Category of activations in host memory, which has no part of the device memory."""

Point: TypeAlias = tuple[int, ...]
"""Bytes at one moment: one number per category on the device, then the total on the host."""


@dataclass
class TraceEvent:
    """Memory during one part of a step.

    Attributes:
        name: Running operation and its position in the model.
        points: Bytes before the first operation and after each operation that allocated.
    """

    name: tuple[str | int, ...]
    points: list[Point]


def on_device(point: Point) -> int:
    """Return the bytes on the device at one moment."""
    return sum(point[:-1])


_TRANSIENT: frozenset[Category] = frozenset({"activations", "temporary"})
# These operations send existing tensors, which keep their category. All other operations between
# ranks use buffers that exist only for communication.
_SENDS = frozenset({"c10d::send", "c10d::broadcast_", "c10d::allreduce_"})
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default

_resize: Any = torch.UntypedStorage.resize_
_running = threading.local()
_lock = threading.Lock()
_num_entered = 0
"""Number of entered traces in all threads. While there are any, ``resize_`` of torch's storages is
replaced.
"""


class _LiveStorage:
    """One live storage."""

    __slots__ = ("category", "num_bytes", "reference")

    def __init__(self, reference: Any, num_bytes: int, category: Category) -> None:
        self.reference = reference
        self.num_bytes = num_bytes
        self.category = category


class StorageTrace(UncompiledDispatchMode):
    """Counts live storages while it is entered. Entering it again continues the count.

    A freed storage is only queued by its weak reference and counted later, before anything else is:
    torch frees a gradient in the middle of ``parameter.grad = None``, and a callback that reads
    ``parameter.grad`` then reads freed memory, which ends the process with signal 11.

    Attributes:
        events: Memory during each part of the measured step.
    """

    def __init__(
        self,
        *,
        on_host: Collection[Category] = (),
        workspaces: Callable[[Any, Sequence[Any]], Sequence[int]] = lambda func, arguments: (),
    ) -> None:
        """Begin to count.

        Args:
            on_host: Categories kept in host memory. They must be given, because tensors on a CPU do
                not show whether they represent host or device memory.
            workspaces: Maps an operation and its arguments to the bytes of each temporary buffer of
                its kernel: ``cuda_attention.workspaces`` or ``gloo_buffers.collective_buffers``.
                Use ``gloo_buffers.untraced_buffers`` if the kernels really run.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._host: dict[Category, int] = dict.fromkeys((*on_host, _OFFLOADED), 0)
        self.events = [TraceEvent(("start",), [self._point()])]
        self._live: dict[int, _LiveStorage] = {}
        self._freed: deque[int] = deque()
        self._parameters: list[Tensor] = []
        self._in_flight: dict[int, list[Tensor]] = {}
        self._queued: list[list[Tensor]] = []
        self._has_grown = False
        self._peak_index: int | None = 0
        self._peak_bytes = 0
        self._phase: Category | None = None
        self._workspaces = workspaces

    @property
    def now(self) -> dict[Category, int]:
        """Bytes of each category on the device."""
        self._remove_freed()
        return self._now

    @property
    def host(self) -> dict[Category, int]:
        """Bytes of each category that an offloading run keeps in host memory."""
        self._remove_freed()
        return self._host

    def __enter__(self) -> Self:
        self._outer = getattr(_running, "trace", None)
        _running.trace = self
        _replace_resize(1)
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        _running.trace = self._outer
        _replace_resize(-1)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := fake_device(func, args)) is not None:
            return device
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # the tensors they contain are dispatched again
        self._remove_freed()
        namespace = func.namespace
        if namespace == "_c10d_functional" and isinstance(args[0], FakeTensor):
            return self._run_fake_collective(func, args, kwargs)
        out = func(*args, **(kwargs or {}))
        self._remove_freed()
        category = self._phase or _result_category()
        if namespace in ("c10d", "fsdp"):
            if func._schema.name not in _SENDS:
                self._mark_communication(args, kwargs or {})
            category = "communication"
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                # A tensor that waits for a message wraps another one and has no storage itself.
                self._add(_unwrap(tensor), category)
        if namespace == "c10d" and "gradients" in self._host:
            self._categorize_gradients()
        if (is_queued := gloo_buffers.outlives_call(func, args)) and self._queued:
            del self._queued[: 1 - gloo_buffers.THREADS]
        buffers = self._hold_workspaces(func, args)
        if func is _WAIT:
            self._in_flight.pop(id(args[0].untyped_storage()), None)
        elif buffers and gloo_buffers.held_until_wait(func):
            self._in_flight[id(out.untyped_storage())] = buffers
        elif is_queued:
            self._queued.append(buffers)
        self._record_point()
        return out

    @contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Count all storages allocated inside the context in one category."""
        outer, self._phase = self._phase, category
        try:
            yield
        finally:
            self._phase = outer

    def tag(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors. Unknown tensors are counted from now on."""
        self._remove_freed()
        for tensor in tensors:
            plain = _unwrap(tensor)
            storage = self._live.get(id(plain.untyped_storage()))
            if storage is None:
                self._add(plain, category)
            else:
                self._recategorize(storage, category)

    def count_gradients_of(self, parameters: Iterable[Tensor]) -> None:
        """Count the ``.grad`` of these parameters as gradients from now on."""
        self._parameters = list(parameters)

    def forget(self) -> None:
        """Discard all events and begin a new measurement."""
        self.begin("start")
        del self.events[:-1]

    def begin(self, *name: str | int) -> None:
        """End the current event and begin a new one."""
        self.finish()
        self._queued.clear()
        self._remove_freed()
        self.events.append(TraceEvent(name, [self._point()]))
        self._peak_index, self._peak_bytes = 0, on_device(self.events[-1].points[0])

    def finish(self) -> None:
        """Complete the last event."""
        self._remove_freed()
        self._record_point()
        self._update_peak()
        self._categorize_gradients()

    def note_size(self, storage: Any) -> None:
        """Record the new size of a storage, for example of gathered parameters."""
        self._remove_freed()
        live = self._live.get(id(storage))
        if live is None:
            return
        if live.category in _TRANSIENT:
            self._recategorize(live, "communication")
        size = storage.nbytes()
        self._count(live.category, size - live.num_bytes)
        live.num_bytes = size
        self._record_point()

    def _run_fake_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a collective on fake tensors, with the memory of a real one.

        Its input is held until its result is waited for, except in an all-reduce, whose result
        begins as a copy of the input. Waiting allocates nothing, in contrast to its fake kernel.
        """
        if func is _WAIT:
            self._in_flight.pop(id(args[0].untyped_storage()), None)
            return args[0]
        out = func(*args, **(kwargs or {}))
        self._add(out, self._phase or _result_category())
        buffers = self._hold_workspaces(func, args)
        if func is not _ALL_REDUCE:
            awaited = buffers if gloo_buffers.held_until_wait(func) else []
            self._in_flight[id(out.untyped_storage())] = [args[0], *awaited]
        self._record_point()
        return out

    def _hold_workspaces(self, func: Any, args: Any) -> list[Tensor]:
        """Return counted storages for the temporary buffers of an operation."""
        buffers = [torch.empty(size, dtype=torch.uint8) for size in self._workspaces(func, args)]
        for buffer in buffers:
            self._add(buffer, self._phase or _result_category())
        return buffers

    def _add(self, tensor: Tensor, category: Category) -> None:
        self._remove_freed()  # the new storage may have the id of a freed one
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or tensor.device.type == "meta":
            return
        size = storage.nbytes()
        reference = weakref.ref(storage, lambda _: self._freed.append(key))
        self._live[key] = _LiveStorage(reference, size, category)
        self._count(category, size)

    def _remove_freed(self) -> None:
        """Count what was freed since the last call, in order."""
        while self._freed:
            self._remove(self._freed.popleft())

    def _remove(self, key: int) -> None:
        live = self._live.pop(key)
        self._count(live.category, -live.num_bytes)

    def _mark_communication(self, args: Any, kwargs: Any) -> None:
        """Categorize the buffers of an operation between ranks as communication."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                live = self._live.get(id(tensor.untyped_storage()))
                if live is not None and live.category in _TRANSIENT:
                    self._recategorize(live, "communication")

    def _recategorize(self, live: _LiveStorage, category: Category) -> None:
        if live.category == category:
            return
        changes_device = (live.category in self._host) != (category in self._host)
        if changes_device:
            self._count(live.category, -live.num_bytes)
            live.category = category
            self._count(category, live.num_bytes)
            return
        counts = self._host if category in self._host else self._now
        counts[live.category] -= live.num_bytes
        counts[category] += live.num_bytes
        live.category = category

    def _count(self, category: Category, change: int) -> None:
        if change < 0:
            self._record_point()
            self._update_peak()
        counts = self._host if category in self._host else self._now
        counts[category] += change
        self._has_grown = self._has_grown or change > 0

    def _record_point(self) -> None:
        """Record the current bytes if a storage was added or has grown since the last point."""
        if not self._has_grown:
            return
        self._has_grown = False
        points = self.events[-1].points
        points.append(self._point())
        if (num_bytes := on_device(points[-1])) > self._peak_bytes:
            self._peak_bytes, self._peak_index = num_bytes, len(points) - 1

    def _update_peak(self) -> None:
        """Update the categories of the peak of an event, before memory is freed.

        Gradients are recognized only here, because no operation shows when a parameter gets one.
        """
        if self._peak_index is not None:
            index, self._peak_index = self._peak_index, None
            self._categorize_gradients()
            self.events[-1].points[index] = self._point()

    def _point(self) -> Point:
        return (*self._now.values(), sum(self._host.values()))

    def _categorize_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                plain = _unwrap(parameter.grad)
                live = self._live.get(id(plain.untyped_storage()))
                if live is not None:
                    self._recategorize(live, "gradients")


def _result_category() -> Category:
    """Return the category of a new result: temporary in backward, activations otherwise.

    Recomputation is a forward inside backward, with gradients enabled; its results are activations.
    """
    if host_memory.is_allocating():
        offloaded: Category = _OFFLOADED
        return offloaded
    return "temporary" if in_backward() and not torch.is_grad_enabled() else "activations"


def _unwrap(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return _unwrap(local_tensor(tensor))
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _replace_resize(change: int) -> None:
    """Count an entered or left trace; replace ``resize_`` for the first, restore it after the last.

    The ranks of a mock world are threads, and leave their traces in any order.
    """
    global _num_entered
    with _lock:
        _num_entered += change
        resize = _resize_and_report if _num_entered else _resize
        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]


def _resize_and_report(storage: Any, size: int) -> Any:
    """Resize a storage and report it to this thread's trace, because no operation shows it."""
    result = _resize(storage, size)
    trace: StorageTrace | None = getattr(_running, "trace", None)
    if trace is not None:
        trace.note_size(storage)
    return result
