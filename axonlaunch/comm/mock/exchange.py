"""Where ranks of a mock world meet: collectives that wait for all, messages that wait for two.

Data moves only when every rank of a collective has come, or both ends of a message have, as on
gloo and NCCL: a send waits for its receiver. It moves tensors; what they mean is not known here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axonlaunch.comm.errors import CommError, MismatchError, say_mismatch, say_ranks, say_tensor
from axonlaunch.comm.mock.output import Output
from axonlaunch.comm.mock.turn_scheduler import TurnScheduler

here = threading.local()
"""``exchange`` and ``rank`` of the mock world whose rank this thread is."""


class CollectiveCall(NamedTuple):
    """What a rank asks of its group; all ranks of a collective must ask the same.

    Formatted only when an error needs it: this is on the path of every collective.
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
    """Something that ranks wait for, and that may fail for all of them at once."""

    done = False
    _error: tuple[type[Exception], str] | None = None

    @abstractmethod
    def describe(self, finished: Set[int]) -> str:
        """Say what is waited for, and which of the ``finished`` ranks never arrived."""

    def fail(self, kind: type[Exception], message: str) -> None:
        """End without a result."""
        self._error, self.done = (kind, message), True

    def raise_if_failed(self) -> None:
        """Raise what it failed with: an exception of its own for each rank."""
        if self._error is not None:
            kind, message = self._error
            raise kind(message)


class PendingCollective(PendingOperation):
    """One collective of one group: who has come with what."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._calls: dict[int, CollectiveCall] = {}
        self._labels: dict[int, str | CollectiveCall] = {}
        self._payloads: dict[int, Any] = {}

    def describe(self, finished: Set[int]) -> str:
        """Say what this is, who is missing, and who will never come."""
        missing = [rank for rank in self.ranks if rank not in self._calls]
        never = [rank for rank in missing if rank in finished]
        gone = f" ({say_ranks(never)} finished without arriving)" if never else ""
        what = next(iter(self._labels.values()))
        return f"{what} in group {list(self.ranks)}, waits for {say_ranks(missing)}{gone}"

    def arrive(self, rank: int, asked: CollectiveCall, label: str, payload: Any) -> bool:
        """Take one rank in; return whether all have come.

        Ranks that ask for different things fail together, also those still to come.
        """
        self._calls[rank] = asked
        self._labels[rank] = label or asked
        self._payloads[rank] = payload
        if asked != next(iter(self._calls.values())) and not self.done:
            self.fail(MismatchError, say_mismatch(self.ranks, self._labels))
        return len(self._calls) == len(self.ranks)

    def finish(self, work: Callable[[list[Any]], None]) -> None:
        """Do the work on what the ranks brought, in rank order."""
        if not self.done:
            try:
                # Inference mode, so that what is written here leaves no trace in autograd, also
                # in tensors that were made in it.
                with torch.inference_mode():
                    work([self._payloads[rank] for rank in self.ranks])
                self.done = True
            except Exception as error:
                what = next(iter(self._labels.values()))
                self.fail(CommError, f"{what} in group {list(self.ranks)}: {error}")
        self._payloads.clear()


class PendingMessage(PendingOperation):
    """One end of a message that has been posted: a send or a receive."""

    def __init__(self, verb: str, rank: int, peer: int | None, content: Output, tag: int) -> None:
        self.verb, self.rank, self.peer, self.content, self.tag = verb, rank, peer, content, tag
        self.source: int | None = None

    def describe(self, finished: Set[int]) -> str:
        """Say what was posted, and whether the other end can still come."""
        way = "to" if self.verb == "send" else "from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        gone = " (it has finished)" if self.peer in finished else ""
        return f"{self.verb} {way} {peer}{gone} of {say_tensor(self.content.tensor)}{tag}"


class Exchange:
    """All collectives and messages of one mock world, shared by its ranks."""

    def __init__(self, turns: TurnScheduler) -> None:
        self.turns = turns
        self._collectives: dict[tuple[Any, int], PendingCollective] = {}
        self._sends: defaultdict[Any, list[PendingMessage]] = defaultdict(list)
        self._receives: defaultdict[Any, list[PendingMessage]] = defaultdict(list)
        self._generations: Counter[Any] = Counter()

    def join_group(self, name: str, ranks: tuple[int, ...], rank: int) -> Any:
        """Return a key for a group, the same on all its ranks, that no earlier group has had."""
        self._generations[name, ranks, rank] += 1
        return name, ranks, self._generations[name, ranks, rank]

    def join(
        self,
        key: tuple[Any, int],
        ranks: tuple[int, ...],
        rank: int,
        asked: CollectiveCall,
        payload: Any,
        work: Callable[[list[Any]], None],
        *,
        label: str = "",
    ) -> PendingCollective:
        """Arrive at a collective; the last rank to come does the work and wakes the others."""
        self.turns.progress(rank)
        collective = self._collectives.get(key)
        if collective is None:
            collective = self._collectives[key] = PendingCollective(ranks)
        if collective.arrive(rank, asked, label, payload):
            del self._collectives[key]
            self.turns.device.wait()
            collective.finish(work)
            self.turns.device.wait()
        if collective.done:
            self.turns.wake(ranks, collective)
        return collective

    def post(self, group: Any, message: PendingMessage) -> None:
        """Post one end of a message; move the data if the other end is there, first come first."""
        self.turns.progress(message.rank)
        sending = message.verb == "send"
        receiver = message.peer if sending else message.rank
        address = (group, receiver, message.tag)
        mine, theirs = (self._sends, self._receives) if sending else (self._receives, self._sends)
        for other in theirs[address]:
            send, receive = (message, other) if sending else (other, message)
            if receive.peer in (None, send.rank):
                theirs[address].remove(other)
                self.turns.device.wait()
                deliver(send, receive)
                self.turns.device.wait()
                self.turns.wake([other.rank], other)
                return
        mine[address].append(message)


def deliver(send: PendingMessage, receive: PendingMessage) -> None:
    """Copy a message from one end to the other, or fail both where they don't fit.

    As on real backends the number of elements counts, not the shape: torch's own pipelining
    sends ``[]`` and receives ``[1]``.
    """
    source, target = send.content.tensor, receive.content.tensor
    if source.dtype != target.dtype or source.numel() != target.numel():
        text = (
            f"rank {send.rank} sends {say_tensor(source)} to rank {receive.rank}, which receives "
            f"{say_tensor(target)}: give both the same shape and dtype"
        )
        send.fail(MismatchError, text)
        receive.fail(MismatchError, text)
        return
    with torch.inference_mode():
        receive.content.write(source)
    receive.source = send.rank
    send.done = receive.done = True
