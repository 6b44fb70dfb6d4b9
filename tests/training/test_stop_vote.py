"""Agreement of ranks to stop: on a CPU in the step of the request, on a GPU one step later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axonlaunch.comm import World
from axonlaunch.training.ending.stop_vote import StopVote


def answers(world: World, asked_in: int, *, steps: int) -> list[bool]:
    vote = StopVote(world)
    votes = []
    for step in range(steps):
        vote.cast(stop=world.rank == 1 and step >= asked_in)
        votes.append(vote.anyone())
    return votes


def test_stop_request_on_cpu_ends_same_step() -> None:
    results = World.mock(2).run(lambda world: answers(world, 1, steps=3))
    assert results == [[False, True, True]] * 2


class _Event:
    """A CUDA event that records the order of its calls."""

    log: list[str]

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


def test_stop_vote_on_gpu_reads_previous_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setattr(_Event, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    empty_like: Any = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: empty_like(x))

    def run(world: World) -> list[bool]:
        vote = StopVote(world)
        vote._lag = 1  # the lag on a CUDA device
        votes = []
        for step in range(4):
            vote.cast(stop=step >= 1)
            votes.append(vote.anyone())
        return votes

    assert World.mock(1).run(run) == [[False, False, True, True]]
    assert log == ["record", "record", "wait", "record", "wait", "record", "wait"]
