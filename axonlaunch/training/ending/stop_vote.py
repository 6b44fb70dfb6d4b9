"""Agreement of all ranks on whether to stop, without waiting for a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm import World

_Answer = Callable[[], bool]


class StopVote:
    """Counts in each step the ranks that received a stop request.

    On a CPU the count is that of the current step. On a GPU the device sums the votes, and the host
    reads the sum of the previous step, which is complete while the device still works on the
    current step. A run on GPUs therefore stops one step later, and its hosts exchange no messages.
    """

    def __init__(self, world: World) -> None:
        """Prepare to vote. Every rank creates one.

        Args:
            world: The ranks that vote.
        """
        self._world = world
        self._lag = 1 if world.device.type == "cuda" else 0
        self._answers: deque[_Answer] = deque()

    def cast(self, *, stop: bool) -> None:
        """Vote. Every rank calls this once per step, before the step."""
        votes = torch.full((), int(stop), device=self._world.device)
        work = None
        if self._world.world_size > 1:
            work = dist.all_reduce(votes, async_op=True)
        self._answers.append(_on_host(votes, work) if self._lag else _answer_of(votes, work))

    def anyone(self) -> bool:
        """Return whether any rank voted to stop, the same on every rank; call once after a step."""
        return len(self._answers) > self._lag and self._answers.popleft()()


def _answer_of(votes: Tensor, work: dist.Work | None) -> _Answer:
    def answer() -> bool:
        if work is not None:
            work.wait()
        return bool(votes)

    return answer


def _on_host(votes: Tensor, work: dist.Work | None) -> _Answer:
    """Make the device copy the sum of the votes to the host asynchronously."""
    if work is not None:
        work.wait()  # only the device's stream waits; the host continues
    copied = torch.empty_like(votes, device="cpu", pin_memory=True)
    copied.copy_(votes, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def answer() -> bool:
        event.synchronize()
        return bool(copied)

    return answer
