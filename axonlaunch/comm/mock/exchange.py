"""Exchanges data between ranks of a mock world: collectives and point-to-point messages.

Data moves only after every rank of a collective, or both ends of a message, have arrived, as on
gloo and NCCL: a send waits for its receiver.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axonlaunch.comm.errors import (
    CommError,
    MismatchError,
    format_mismatch,
    format_ranks,
    format_tensor,
)
from axonlaunch.comm.mock.output import Output
from axonlaunch.comm.mock.turn_scheduler import TurnScheduler

here = threading.local()
"""``exchange`` of the mock world and ``rank`` of this thread."""


class CollectiveCall(NamedTuple):
    """Description of a rank's call; all ranks of a collective must have the same one.

    It is formatted only for an error, because it is created in every collective.
    """

    name: str
    detail: str
    tensors: tuple[tuple[torch.dtype, torch.Size], ...]

    def __str__(self) -> str:
        shapes = [
            f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            for dtype, shape in self.tensors[:3]
        ]
        if len(self.tensors) > 3:
            shapes.append(f"{len(self.tensors) - 3} more")
        of = f" of {', '.join(shapes)}" if shapes else ""
        return f"{self.name}{f' {self.detail}' if self.detail else ''}{of}"


def describe_call(name: str, tensors: Sequence[Tensor] = (), *, detail: str = "") -> CollectiveCall:
    """Describe a call on tensors."""
    return CollectiveCall(name, detail, tuple((tensor.dtype, tensor.shape) for tensor in tensors))


class PendingOperation(ABC):
    """An operation that ranks wait for, and that may fail for all of them at once."""

    done = False
    _error: tuple[type[Exception], str] | None = None

    @abstractmethod
    def describe(self, finished: Set[int]) -> str:
        """Describe the operation, and which of the ``finished`` ranks never arrived."""

    def fail(self, kind: type[Exception], message: str) -> None:
        """Mark the operation as failed; every waiting rank raises ``kind(message)``."""
        self._error, self.done = (kind, message), True

    def raise_if_failed(self) -> None:
        """Raise the failure, as a separate exception object for each rank."""
        if self._error is not None:
            kind, message = self._error
            raise kind(message)


class PendingCollective(PendingOperation):
    """A collective of a group that not all ranks have joined yet."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._calls: dict[int, CollectiveCall] = {}
        self._labels: dict[int, str | CollectiveCall] = {}
        self._payloads: dict[int, Any] = {}

    def describe(self, finished: Set[int]) -> str:
        """Describe the collective, the missing ranks, and those that have finished."""
        missing = [rank for rank in self.ranks if rank not in self._calls]
        finished_ranks = [rank for rank in missing if rank in finished]
        note = (
            f" ({format_ranks(finished_ranks)} finished without arriving)" if finished_ranks else ""
        )
        call = next(iter(self._labels.values()))
        return f"{call} in group {list(self.ranks)}, waits for {format_ranks(missing)}{note}"

    def arrive(self, rank: int, call: CollectiveCall, label: str, payload: Any) -> bool:
        """Record the arrival of a rank; return whether all have arrived.

        If ranks make different calls, they all fail, including those that have not arrived yet.
        """
        self._calls[rank] = call
        self._labels[rank] = label or call
        self._payloads[rank] = payload
        if call != next(iter(self._calls.values())) and not self.done:
            self.fail(MismatchError, format_mismatch(self.ranks, self._labels))
        return len(self._calls) == len(self.ranks)

    def finish(self, work: Callable[[list[Any]], None]) -> None:
        """Call a function once with the payloads of all ranks, in rank order."""
        if not self.done:
            try:
                # Inference mode, so that writing is invisible to autograd and also works for
                # inference tensors.
                with torch.inference_mode():
                    work([self._payloads[rank] for rank in self.ranks])
                self.done = True
            except Exception as error:
                call = next(iter(self._labels.values()))
                self.fail(CommError, f"{call} in group {list(self.ranks)}: {error}")
        self._payloads.clear()


class PendingMessage(PendingOperation):
    """One end of a message that has been posted: a send or a receive."""

    def __init__(self, verb: str, rank: int, peer: int | None, content: Output, tag: int) -> None:
        self.verb, self.rank, self.peer, self.content, self.tag = verb, rank, peer, content, tag
        self.source: int | None = None

    def describe(self, finished: Set[int]) -> str:
        """Describe the message, and whether the other end can still arrive."""
        preposition = "to" if self.verb == "send" else "from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        note = " (it has finished)" if self.peer in finished else ""
        return (
            f"{self.verb} {preposition} {peer}{note} of {format_tensor(self.content.tensor)}{tag}"
        )


class Exchange:
    """All collectives and messages of one mock world, shared by its ranks."""

    def __init__(self, turns: TurnScheduler) -> None:
        self.turns = turns
        self._collectives: dict[tuple[Any, int], PendingCollective] = {}
        self._sends: defaultdict[Any, list[PendingMessage]] = defaultdict(list)
        self._receives: defaultdict[Any, list[PendingMessage]] = defaultdict(list)
        self._generations: Counter[Any] = Counter()

    def join_group(self, name: str, ranks: tuple[int, ...], rank: int) -> Any:
        """Return a unique key for a new group that is the same on all its ranks."""
        self._generations[name, ranks, rank] += 1
        return name, ranks, self._generations[name, ranks, rank]

    def join(
        self,
        key: tuple[Any, int],
        ranks: tuple[int, ...],
        rank: int,
        call: CollectiveCall,
        payload: Any,
        work: Callable[[list[Any]], None],
        *,
        label: str = "",
    ) -> PendingCollective:
        """Arrive at a collective; the last rank does the work and wakes the others."""
        self.turns.progress(rank)
        collective = self._collectives.get(key)
        if collective is None:
            collective = self._collectives[key] = PendingCollective(ranks)
        if collective.arrive(rank, call, label, payload):
            del self._collectives[key]
            self.turns.device.wait()
            collective.finish(work)
            self.turns.device.wait()
        if collective.done:
            self.turns.wake(ranks, collective)
        return collective

    def post(self, group: Any, message: PendingMessage) -> None:
        """Post one end of a message; move the data if the other end was posted before.

        Matching ends are paired in the order in which they were posted.
        """
        self.turns.progress(message.rank)
        sending = message.verb == "send"
        receiver = message.peer if sending else message.rank
        address = (group, receiver, message.tag)
        own_queue, peer_queue = (
            (self._sends, self._receives) if sending else (self._receives, self._sends)
        )
        for other in peer_queue[address]:
            send, receive = (message, other) if sending else (other, message)
            if receive.peer in (None, send.rank):
                peer_queue[address].remove(other)
                self.turns.device.wait()
                deliver(send, receive)
                self.turns.device.wait()
                self.turns.wake([other.rank], other)
                return
        own_queue[address].append(message)


def deliver(send: PendingMessage, receive: PendingMessage) -> None:
    """Copy a message from the sender to the receiver, or fail both if it does not fit.

    As on real backends, only the number of elements must match, not the shape: torch's pipelining
    sends ``[]`` and receives ``[1]``.
    """
    source, target = send.content.tensor, receive.content.tensor
    if source.dtype != target.dtype or source.numel() != target.numel():
        text = (
            f"rank {send.rank} sends {format_tensor(source)} to rank {receive.rank}, which "
            f"receives {format_tensor(target)}: give both the same shape and dtype"
        )
        send.fail(MismatchError, text)
        receive.fail(MismatchError, text)
        return
    with torch.inference_mode():
        receive.content.write(source)
    receive.source = send.rank
    send.done = receive.done = True
