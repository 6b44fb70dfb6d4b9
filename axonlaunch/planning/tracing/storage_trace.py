"""Follows every storage that tensors of one thread hold, by what it is for: bytes now and at most.

It watches tensors with values and fake ones alike. It counts what torch's operations return, and
what their kernels are said to hold besides; not what an allocator rounds up to.
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
from axonlaunch.models.torch_internals import in_backward, local_tensor
from axonlaunch.planning.tracing import gloo_buffers
from axonlaunch.planning.tracing.dispatch_mode import UncompiledDispatchMode

Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "communication", "temporary"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

Point: TypeAlias = tuple[int, ...]
"""Bytes at one moment: of each of ``CATEGORIES`` on the device, then those kept on the host."""


@dataclass
class TraceEvent:
    """A part of a step.

    Attributes:
        name: What runs, and where in the model.
        points: Bytes after each of its operations that allocated, and before the first.
    """

    name: tuple[str | int, ...]
    points: list[Point]


def on_device(point: Point) -> int:
    """Return a moment's bytes on the device."""
    return sum(point[:-1])


_PASSING: frozenset[Category] = frozenset({"activations", "temporary"})
# What they are given to send stays what it is; the other operations between ranks are given
# buffers that exist for them.
_SENDS = frozenset({"c10d::send", "c10d::broadcast_", "c10d::allreduce_"})
_DEVICE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default

_resize: Any = torch.UntypedStorage.resize_
_running = threading.local()


class _Held:
    """One live storage."""

    __slots__ = ("alive", "category", "num_bytes")

    def __init__(self, alive: Any, num_bytes: int, category: Category) -> None:
        self.alive = alive
        self.num_bytes = num_bytes
        self.category = category


class StorageTrace(UncompiledDispatchMode):
    """Counts live storages while it is entered; it may be entered again and continues counting.

    A freed storage is only queued by its weak reference and counted later, before anything else is:
    torch frees a gradient in the middle of ``parameter.grad = None``, and a callback that reads
    ``parameter.grad`` then reads freed memory, which ends the process with signal 11.

    Attributes:
        events: What was held in each part of what is measured.
    """

    def __init__(
        self,
        *,
        on_host: Collection[Category] = (),
        workspaces: Callable[[Any, Sequence[Any]], Sequence[int]] = lambda func, arguments: (),
    ) -> None:
        """Begin to count.

        Args:
            on_host: Categories that live in host memory; on a CPU, where host and device are one,
                this alone distinguishes them.
            workspaces: As ``cuda_attention.workspaces`` and ``gloo_buffers.of_collective`` give
                them; where kernels run here, ``gloo_buffers.unseen``.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._host: dict[Category, int] = dict.fromkeys(on_host, 0)
        self.events = [TraceEvent(("start",), [self._point()])]
        self._live: dict[int, _Held] = {}
        self._freed: deque[int] = deque()
        self._parameters: list[Tensor] = []
        self._in_flight: dict[int, list[Tensor]] = {}
        self._queued: list[list[Tensor]] = []
        self._grown = False
        self._top: int | None = 0
        self._highest = 0
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
        torch.UntypedStorage.resize_ = _resize_and_note  # type: ignore[assignment, method-assign]
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        _running.trace = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # more than half of all that comes
            return args[0].fake_device
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # they come again as the plain tensors that they hold
        self._remove_freed()
        namespace = func.namespace
        if namespace == "_c10d_functional" and isinstance(args[0], FakeTensor):
            return self._without_values(func, args, kwargs)
        out = func(*args, **(kwargs or {}))
        self._remove_freed()
        category = self._phase or _category()
        if namespace in ("c10d", "fsdp"):
            if func._schema.name not in _SENDS:
                self._between_ranks(args, kwargs or {})
            category = "communication"
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                # A tensor that waits for a message holds another one, and no storage of its own.
                self._add(_plain(tensor), category)
        if namespace == "c10d" and self._host:
            self._tag_gradients()
        if (is_queued := gloo_buffers.returns_before(func, args)) and self._queued:
            del self._queued[: 1 - gloo_buffers.THREADS]
        held = self._held_besides(func, args)
        if func is _WAIT:
            self._in_flight.pop(id(args[0].untyped_storage()), None)
        elif held and gloo_buffers.are_awaited(func):
            self._in_flight[id(out.untyped_storage())] = held
        elif is_queued:
            self._queued.append(held)
        self._note()
        return out

    @contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Count whatever is allocated inside under one category."""
        before, self._phase = self._phase, category
        try:
            yield
        finally:
            self._phase = before

    def tag(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors; those not seen yet are counted from now on."""
        self._remove_freed()
        for tensor in tensors:
            plain = _plain(tensor)
            storage = self._live.get(id(plain.untyped_storage()))
            if storage is None:
                self._add(plain, category)
            else:
                self._move(storage, category)

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Count the ``.grad`` of these parameters as gradients from now on."""
        self._parameters = list(parameters)

    def forget(self) -> None:
        """Forget all events, and measure from now on."""
        self.begin("start")
        del self.events[:-1]

    def begin(self, *name: str | int) -> None:
        """Begin an event, which ends the one before."""
        self.finish()
        self._queued.clear()
        self._remove_freed()
        self.events.append(TraceEvent(name, [self._point()]))
        self._top, self._highest = 0, on_device(self.events[-1].points[0])

    def finish(self) -> None:
        """Complete what the last event says."""
        self._remove_freed()
        self._note()
        self._settle()
        self._tag_gradients()

    def note_size(self, storage: Any) -> None:
        """Note that a storage has another size, as those of gathered parameters get."""
        self._remove_freed()
        live = self._live.get(id(storage))
        if live is None:
            return
        if live.category in _PASSING:
            self._move(live, "communication")
        size = storage.nbytes()
        self._count(live.category, size - live.num_bytes)
        live.num_bytes = size
        self._note()

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation between ranks on fake tensors, with a real one's memory.

        Its input is held until somebody waits for its result, except where the result begins as a
        copy of it. A fake kernel of waiting would allocate, a real one doesn't.
        """
        if func is _WAIT:
            self._in_flight.pop(id(args[0].untyped_storage()), None)
            return args[0]
        out = func(*args, **(kwargs or {}))
        self._add(out, self._phase or _category())
        held = self._held_besides(func, args)
        if func is not _ALL_REDUCE:
            awaited = held if gloo_buffers.are_awaited(func) else []
            self._in_flight[id(out.untyped_storage())] = [args[0], *awaited]
        self._note()
        return out

    def _held_besides(self, func: Any, args: Any) -> list[Tensor]:
        """Count what an operation holds beside its tensors, for as long as the result lives."""
        held = [torch.empty(size, dtype=torch.uint8) for size in self._workspaces(func, args)]
        for buffer in held:
            self._add(buffer, self._phase or _category())
        return held

    def _add(self, tensor: Tensor, category: Category) -> None:
        self._remove_freed()  # the new storage may have the id of a freed one
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or tensor.device.type == "meta":
            return
        size = storage.nbytes()
        alive = weakref.ref(storage, lambda _: self._freed.append(key))
        self._live[key] = _Held(alive, size, category)
        self._count(category, size)

    def _remove_freed(self) -> None:
        """Count what was freed since the last call, in order."""
        while self._freed:
            self._remove(self._freed.popleft())

    def _remove(self, key: int) -> None:
        live = self._live.pop(key)
        self._count(live.category, -live.num_bytes)

    def _between_ranks(self, args: Any, kwargs: Any) -> None:
        """Take an operation's buffers, given to be written or read, for what they are."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                live = self._live.get(id(tensor.untyped_storage()))
                if live is not None and live.category in _PASSING:
                    self._move(live, "communication")

    def _move(self, live: _Held, category: Category) -> None:
        if live.category == category:
            return
        crosses = (live.category in self._host) != (category in self._host)
        if crosses:
            self._count(live.category, -live.num_bytes)
            live.category = category
            self._count(category, live.num_bytes)
            return
        place = self._host if category in self._host else self._now
        place[live.category] -= live.num_bytes
        place[category] += live.num_bytes
        live.category = category

    def _count(self, category: Category, change: int) -> None:
        if change < 0:
            self._note()
            self._settle()
        place = self._host if category in self._host else self._now
        place[category] += change
        self._grown = self._grown or change > 0

    def _note(self) -> None:
        """Write down a moment at which more is held than before."""
        if not self._grown:
            return
        self._grown = False
        points = self.events[-1].points
        points.append(self._point())
        if (num_bytes := on_device(points[-1])) > self._highest:
            self._highest, self._top = num_bytes, len(points) - 1

    def _settle(self) -> None:
        """Write down what an event's peak is made of, before it is left.

        Gradients are recognised only here: nothing says when a parameter gets one.
        """
        if self._top is not None:
            top, self._top = self._top, None
            self._tag_gradients()
            self.events[-1].points[top] = self._point()

    def _point(self) -> Point:
        return (*self._now.values(), sum(self._host.values()))

    def _tag_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                plain = _plain(parameter.grad)
                live = self._live.get(id(plain.untyped_storage()))
                if live is not None:
                    self._move(live, "gradients")


def _category() -> Category:
    """Say what an operation's result is for: for backward, unless backward makes it.

    Recomputation is a forward inside of backward, with gradients enabled.
    """
    return "temporary" if in_backward() and not torch.is_grad_enabled() else "activations"


def _plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return _plain(local_tensor(tensor))
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _resize_and_note(storage: Any, size: int) -> Any:
    """Resize a storage and report it to this thread's trace: no operation does."""
    result = _resize(storage, size)
    trace: StorageTrace | None = getattr(_running, "trace", None)
    if trace is not None:
        trace.note_size(storage)
    return result
