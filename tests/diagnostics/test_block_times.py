"""Ranks with GPUs are compared by events around their blocks; no step waits for its device."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from axonlaunch.comm import Backend, World
from axonlaunch.diagnostics import block_times
from axonlaunch.diagnostics.block_times import BlockTimes
from axonlaunch.diagnostics.stragglers import Stragglers

now: dict[int, float] = defaultdict(float)
"""Milliseconds of work on each rank's stream until now."""
ready = True
"""Whether devices have completed the recorded work."""


class MadeUpEvent:
    """A simulated CUDA event without functions that wait."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = now[dist.get_rank()]

    def query(self) -> bool:
        return ready and self.at >= 0

    def elapsed_time(self, other: MadeUpEvent) -> float:
        assert self.query()
        assert other.query()
        return other.at - self.at


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward = backward
        now[dist.get_rank()] += forward
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        now[dist.get_rank()] += ctx.backward
        return gradients[0] * 2, None, None


class Timed(nn.Module):
    """Adds milliseconds of work to the stream."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.taken = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        work: Any = _Work.apply
        result: Tensor = work(x, *self.taken)
        return result


@pytest.fixture(autouse=True)
def _events(monkeypatch: pytest.MonkeyPatch) -> None:
    now.clear()
    monkeypatch.setattr(torch.cuda, "Event", MadeUpEvent)
    monkeypatch.setitem(globals(), "ready", True)
    clock = SimpleNamespace(perf_counter=lambda: now[-1])
    monkeypatch.setattr(block_times, "time", clock)


def step(watch: Any, blocks: list[Timed], *, between: float = 3.0) -> None:
    """Run one step as a trainer, with waits for other ranks between blocks, forward and
    backward.
    """
    watch.note("reading")
    watch.note("stepping")
    x = torch.ones(2, requires_grad=True)
    wait = Timed(between, between)
    for block in blocks:
        x = wait(block(x))
    x.sum().backward()


def test_the_slow_one_of_two_gpus_is_reported() -> None:
    def run(world: World) -> Any:
        gpus: Any = SimpleNamespace(
            world_size=2, backend=Backend.NCCL, device=torch.device("cuda", world.rank)
        )
        slow = 2 if world.rank == 1 else 1
        blocks = [Timed(10 * slow, 20 * slow) for _ in range(2)]
        watch = Stragglers(gpus, blocks=blocks)
        for number in range(3):
            # The fast one waits for the slow one.
            step(watch, blocks, between=5 if slow == 2 else 20)
            reported = watch.compare(step=number)
            assert (reported is None) == (number < 2)  # the first is not measured
        watch.close()
        return reported

    times, slowest = World.mock(2).run(run)[0]
    assert times.compute == (0.43, 0.86)
    assert times.wait == (0.57, 0.14)
    assert (slowest.rank, slowest.cost) == (1, pytest.approx(120 / 140 - 60 / 140, abs=1e-3))


def test_step_time_is_blocks_plus_data_plus_rest() -> None:
    def run(world: World) -> list[float]:
        del world
        blocks = [Timed(10, 20), Timed(10, 20)]
        watch = BlockTimes(blocks)
        step(watch, blocks)
        step(watch, blocks)
        now[-1] += 1.0
        watch.note("reading")
        now[-1] += 0.004
        watch.note("stepping")
        return watch.seconds_by_kind()

    [[read, computed, rest, without_core]] = World.mock(1).run(run)
    assert computed == pytest.approx(0.060)
    assert (read, rest, without_core) == pytest.approx((0.004, 0.012 - 0.004, 0.0))


def test_nothing_is_reported_before_the_device_has_done_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(world: World) -> None:
        del world
        blocks = [Timed(10, 20)]
        watch = BlockTimes(blocks)
        for _ in range(3):
            step(watch, blocks)
        monkeypatch.setitem(globals(), "ready", False)
        assert watch.seconds_by_kind() == [0.0] * 4
        monkeypatch.setitem(globals(), "ready", True)
        assert sum(watch.seconds_by_kind()) > 0

    World.mock(1).run(run)


def test_steps_that_are_not_measured_record_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(world: World) -> None:
        del world
        blocks = [Timed(10, 20)]
        watch = BlockTimes(blocks)
        step(watch, blocks)
        step(watch, blocks)
        watch.note("evaluating")
        monkeypatch.delattr(torch.cuda, "Event")
        step(watch, blocks)
        with torch.no_grad():
            blocks[0](torch.ones(2))
        watch.close()
        assert not blocks[0]._forward_hooks

    World.mock(1).run(run)


def test_ranks_that_share_a_gpu_are_not_compared() -> None:
    def run(world: World) -> None:
        shared: Any = SimpleNamespace(
            world_size=2, backend=Backend.MOCK, device=torch.device("cuda", 0)
        )
        watch = Stragglers(shared, blocks=[Timed(1, 1)])
        watch.note("stepping")
        assert watch.compare(step=world.rank) is None

    World.mock(2).run(run)


def test_parameters_are_gathered_before_a_block_s_time_begins_and_reduced_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fully_shard registers hooks at the same places; its waits are not part of the block's
    time.
    """
    happened: list[str] = []  # on rank 0

    def noted(name: str) -> None:
        method = getattr(FSDPParamGroup, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 0:
                happened.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(FSDPParamGroup, name, call)

    def mark() -> MadeUpEvent:
        if dist.get_rank() == 0:
            happened.append("event")
        return MadeUpEvent(enable_timing=True)

    noted("wait_for_unshard")
    noted("post_backward")
    monkeypatch.setattr(block_times, "_mark", mark)

    def run(world: World) -> None:
        mesh = world.mesh(dp_shard=2).device_mesh
        blocks = [nn.Linear(4, 4) for _ in range(2)]
        model = nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 4))
        for part in (*blocks, model):
            fully_shard(part, mesh=mesh)
        watch: Any = BlockTimes(blocks)
        step(watch, [])
        watch.note("reading")
        watch.note("stepping")
        happened.clear()
        model(torch.ones(2, 4)).sum().backward()

    World.mock(2).run(run)
    root = "wait_for_unshard"
    forward = ["wait_for_unshard", "event", "event"]
    backward = ["wait_for_unshard", "event", "event", "post_backward"]
    assert happened == [root, *forward * 2, root, *backward * 2, "post_backward"]
