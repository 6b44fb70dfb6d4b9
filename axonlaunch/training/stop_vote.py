"""Whether any rank was asked to stop, agreed on by all without waiting for a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm import World

_Answer = Callable[[], bool]


class StopVote:
    """Sums in each step over the world what each rank was asked.

    On a CPU the sum is of the step itself. On a GPU the device sums, in the order of its own work,
    and the host reads the sum of the step before: that one is there, while the device is still busy
    with what was launched since. So a run on GPUs stops one step later, and its hosts exchange
    nothing.
    """

    def __init__(self, world: World) -> None:
        """Prepare to vote; every rank makes one.

        Args:
            world: Who votes.
        """
        self._world = world
        self._lag = 1 if world.device.type == "cuda" else 0
        self._answers: deque[_Answer] = deque()

    def cast(self, *, stop: bool) -> None:
        """Take what this rank was asked; every rank calls this once a step, before it."""
        asked = torch.full((), int(stop), device=self._world.device)
        work = None
        if self._world.world_size > 1:
            work = dist.all_reduce(asked, async_op=True)
        self._answers.append(_on_host(asked, work) if self._lag else _of_work(asked, work))

    def anyone(self) -> bool:
        """Return the same answer on every rank; called once a step, after it."""
        return len(self._answers) > self._lag and self._answers.popleft()()


def _of_work(asked: Tensor, work: dist.Work | None) -> _Answer:
    def answer() -> bool:
        if work is not None:
            work.wait()
        return bool(asked)

    return answer


def _on_host(asked: Tensor, work: dist.Work | None) -> _Answer:
    """Let the device copy its sum to the host once it has it."""
    if work is not None:
        work.wait()  # the device's stream does; the host continues
    copied = torch.empty_like(asked, device="cpu", pin_memory=True)
    copied.copy_(asked, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def answer() -> bool:
        event.synchronize()
        return bool(copied)

    return answer
