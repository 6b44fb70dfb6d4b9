from __future__ import annotations

import contextvars
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.mock_failure import failure_of

from axonlaunch import comm
from axonlaunch.comm import (
    CommError,
    World,
)
from axonlaunch.comm.mock.process_group import MockProcessGroup
from axonlaunch.comm.mock.torch_internals import threads_are_isolated

# Running.


def test_mock_run_returns_results_by_rank() -> None:
    def describe(world: World, scale: int, *, shift: int) -> tuple[int, int, int, bool, str, str]:
        return (
            world.rank * scale + shift,
            world.local_rank,
            world.world_size,
            world.is_main,
            world.backend.value,
            world.device.type,
        )

    assert World.mock(3).run(describe, 10, shift=1) == [
        (1, 0, 3, True, "mock", "cpu"),
        (11, 1, 3, False, "mock", "cpu"),
        (21, 2, 3, False, "mock", "cpu"),
    ]


def test_mock_ranks_run_one_at_a_time() -> None:
    running: list[int] = []
    order: list[int] = []

    def step(world: World) -> None:
        for _ in range(3):
            running.append(world.rank)
            time.sleep(0.001)
            assert running == [world.rank]
            running.remove(world.rank)
            order.append(world.rank)
            comm.barrier()

    World.mock(3).run(step)
    assert order == [0, 1, 2, 2, 0, 1, 1, 2, 0]


def test_64_ranks_all_reduce() -> None:
    def reduce(world: World) -> float:
        tensor = torch.full((1000,), float(world.rank))
        for _ in range(5):
            comm.all_reduce_mean(tensor)
        return tensor[0].item()

    assert World.mock(64).run(reduce) == [31.5] * 64


def test_mock_ranks_inherit_context_variables() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert World.mock(2).run(lambda _: variable.get()) == [7, 7]


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_has_at_least_one_rank(size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size={size}: a world has at least one rank"):
        World.mock(size)


def test_a_time_limit_is_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s=0: must be more than 0 seconds"):
        World.mock(1, timeout_s=0)


# Random numbers.


def draws(world: World) -> list[list[float]]:
    drawn = []
    for _ in range(3):
        drawn.append(torch.rand(2).tolist())
        comm.barrier()
    return drawn


def test_each_rank_starts_with_the_callers_random_state_and_leaves_it() -> None:
    torch.manual_seed(3)
    alone = [torch.rand(2).tolist() for _ in range(3)]
    torch.manual_seed(3)
    assert World.mock(3).run(draws) == [alone] * 3
    assert torch.rand(2).tolist() == alone[0]


def test_seeding_one_mock_rank_does_not_affect_others() -> None:
    def seeded(world: World) -> list[list[float]]:
        torch.manual_seed(world.rank)
        return draws(world)

    alone = []
    for rank in range(3):
        torch.manual_seed(rank)
        alone.append([torch.rand(2).tolist() for _ in range(3)])
    assert World.mock(3).run(seeded) == alone


def test_dropout_between_collectives_is_the_same_every_time() -> None:
    def train(world: World) -> list[list[float]]:
        torch.manual_seed(world.rank)
        dropout, sums = torch.nn.Dropout(0.5), []
        for step in range(4):
            value = dropout(torch.ones(4))
            if step % 2 == world.rank % 2:
                value = dropout(value)
            sums.append(comm.all_reduce_sum(value).tolist())
        return sums

    runs = [World.mock(4).run(train) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_sums_are_the_same_to_the_bit_in_rank_order() -> None:
    def reduce(world: World) -> torch.Tensor:
        tensor = torch.randn(101, generator=torch.Generator().manual_seed(world.rank))
        comm.barrier()
        return comm.all_reduce_sum(tensor)

    expected = torch.zeros(101)
    for rank in range(5):
        part = torch.randn(101, generator=torch.Generator().manual_seed(rank))
        expected = part if rank == 0 else expected + part
    for _ in range(2):
        assert all(torch.equal(result, expected) for result in World.mock(5).run(reduce))


# Cleaning up.


def num_mock_groups() -> int:
    gc.collect()
    return sum(type(item) is MockProcessGroup for item in gc.get_objects())


def test_mock_run_cleans_up_after_success_and_failure() -> None:
    hook, threads, variables = sys.excepthook, threading.active_count(), dict(os.environ)
    previous_world, groups = dist.distributed_c10d._world, num_mock_groups()

    def use(world: World, fail: bool) -> None:
        world.new_group([0, 1])
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        if fail and world.rank == 1:
            raise ValueError("boom")
        comm.barrier()

    for fail in (False, True):
        if fail:
            failure_of(lambda world: use(world, fail=True))
        else:
            World.mock(3).run(use, fail)
        assert not dist.is_initialized()
        assert not threads_are_isolated()
        assert dist.distributed_c10d._world is previous_world
        assert sys.excepthook is hook
        assert threading.active_count() == threads
        assert dict(os.environ) == variables
        assert num_mock_groups() == groups


def test_mock_run_restores_world_of_processes() -> None:
    with World.init() as world:
        group = dist.group.WORLD
        assert World.mock(2).run(lambda _: comm.world_size()) == [2, 2]
        assert dist.group.WORLD is group
        assert comm.world_size() == 1
        assert comm.all_reduce_sum(torch.ones(1), group=world.default_group).item() == 1


def test_mock_worlds_do_not_run_concurrently() -> None:
    for size in (1, 4, 2):
        assert World.mock(size).run(lambda world: comm.world_size()) == [size] * size

    def nest(world: World) -> None:
        World.mock(2).run(lambda _: None)

    failure = failure_of(nest, size=1)
    assert "a mock world is already running in this process" in str(failure)


def test_a_world_can_run_in_a_thread() -> None:
    sizes: list[Any] = []

    def work() -> None:
        sizes.extend(World.mock(2).run(lambda world: comm.all_gather(torch.ones(1)).shape[0]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sizes == [2, 2]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that starts the tests in the background makes them ignore SIGINT."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_keyboard_interrupt_unwinds_mock_ranks() -> None:
    unwound: list[int] = []
    waited_to_the_end: list[int] = []

    def wait(world: World) -> None:
        try:
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    time.sleep(0.01)
                waited_to_the_end.append(world.rank)
            comm.barrier()
        finally:
            unwound.append(world.rank)

    with pytest.raises(KeyboardInterrupt):
        World.mock(3).run(wait)
    assert not waited_to_the_end
    assert sorted(unwound) == [0, 1, 2]
    assert not dist.is_initialized()


def test_too_few_threads_for_mock_ranks_fails_cleanly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, start = threading.active_count(), threading.Thread.start

    def start_two(self: threading.Thread) -> None:
        if self.name == "mock-rank-2":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    failure = failure_of(lambda _: comm.barrier())
    assert str(failure) == "rank 2 failed: RuntimeError: can't start new thread"
    assert threading.active_count() == threads


def test_thread_outside_mock_ranks_may_not_communicate() -> None:
    def use_a_thread(world: World) -> str:
        group, said = world.default_group.torch_group, []

        def communicate() -> None:
            try:
                group.barrier()
            except CommError as error:
                said.append(str(error))

        thread = threading.Thread(target=communicate, name="helper")
        thread.start()
        thread.join()
        return said[0]

    said = World.mock(2).run(use_a_thread)
    assert "rank 1 of a mock world communicates from thread 'helper'" in said[1]


def test_mock_ranks_share_process_globals() -> None:
    random.seed(0)
    expected = sorted(random.random() for _ in range(3))
    random.seed(0)
    assert sorted(World.mock(3).run(lambda _: random.random())) == expected


def test_a_rank_may_close_its_world() -> None:
    def close(world: World) -> bool:
        with world:
            comm.barrier()
        return dist.is_initialized()

    assert World.mock(2).run(close) == [False, False]


def test_world_init_inside_a_mock_rank_is_refused() -> None:
    failure = failure_of(lambda _: World.init(), size=1)
    assert "this process already has a world (or a torch default group)" in str(failure)
