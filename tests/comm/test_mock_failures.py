"""A rank of the mock world that fails, waits forever or differs is named to all."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.mock_failure import failure_of

from axonlaunch import comm
from axonlaunch.comm import (
    CommError,
    DeadlockError,
    MismatchError,
    PeerFailedError,
    World,
)


def test_a_rank_that_raises_is_named_to_the_others_and_to_the_caller() -> None:
    errors: dict[int, BaseException] = {}

    def step(world: World) -> None:
        if world.rank == 1:
            raise ZeroDivisionError("boom")
        try:
            comm.all_reduce_sum(torch.ones(2))
        except CommError as error:
            errors[world.rank] = error
            raise

    failure = failure_of(step)
    assert failure.rank == 1
    assert isinstance(failure.__cause__, ZeroDivisionError)
    assert str(failure) == "rank 1 failed: ZeroDivisionError: boom"
    assert sorted(errors) == [0, 2]
    assert str(errors[0]) == (
        "rank 1 failed while rank 0 was waiting: all_reduce_sum of float32 [2] in group "
        "[0, 1, 2], waits for ranks 1, 2: ZeroDivisionError: boom"
    )
    assert "rank 1 failed while rank 2 was communicating" in str(errors[2])
    assert all(isinstance(error, PeerFailedError) for error in errors.values())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_rank_that_exits_is_named(kind: type[BaseException]) -> None:
    def step(world: World) -> None:
        if world.rank == 2:
            raise kind(3)
        comm.barrier()

    failure = failure_of(step)
    assert failure.rank == 2
    assert isinstance(failure.__cause__, kind)


def test_a_rank_that_dies_in_the_backward_pass_of_others_is_named() -> None:
    def step(world: World) -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if world.rank == 0:
            raise MemoryError("no more")
        loss.backward()

    failure = failure_of(step)
    assert failure.rank == 0
    assert isinstance(failure.__cause__, MemoryError)


def test_deadlock_report_names_operation_of_each_rank() -> None:
    def wait_in_a_ring(world: World) -> None:
        comm.recv(torch.zeros(4), src=(world.rank + 1) % 3)

    failure = failure_of(wait_in_a_ring)
    assert isinstance(failure.__cause__, DeadlockError)
    for rank in range(3):
        assert f"rank {rank}: recv from rank {(rank + 1) % 3} of float32 [4]" in str(failure)


def test_two_ranks_that_both_send_first_are_in_deadlock_as_on_real_backends() -> None:
    def send_first(world: World) -> None:
        dist.send(torch.zeros(2), 1 - world.rank)
        dist.recv(torch.zeros(2), 1 - world.rank)

    failure = failure_of(send_first, size=2)
    assert "rank 0: send to rank 1 of float32 [2]; rank 1: send to rank 0" in str(failure)


def test_a_rank_that_finished_without_arriving_is_named() -> None:
    def leave_early(world: World) -> None:
        if world.rank != 1:
            comm.all_gather(torch.zeros(2))

    failure = failure_of(leave_early)
    assert isinstance(failure.__cause__, DeadlockError)
    assert (
        "rank 0: all_gather of float32 [2] in group [0, 1, 2], waits for rank 1 "
        "(rank 1 finished without arriving)"
    ) in str(failure)


def test_waiting_for_finished_rank_names_it() -> None:
    def expect(world: World) -> None:
        if world.rank == 0:
            dist.recv(torch.zeros(2), 1)

    failure = failure_of(expect, size=2)
    assert "rank 0: recv from rank 1 (it has finished) of float32 [2]" in str(failure)


def test_a_rank_that_sleeps_too_long_is_named_with_where_it_is() -> None:
    def sleep_on(world: World) -> None:
        if world.rank == 1:
            time.sleep(0.7)
        comm.barrier()

    failure = failure_of(sleep_on, timeout_s=0.2)
    assert failure.rank == 1
    assert isinstance(failure.__cause__, TimeoutError)
    assert "rank 1 has not communicated for 0.2 s; it is in sleep_on at test_mock_failures" in str(
        failure
    )
    assert "rank 0: barrier in group [0, 1, 2], waits for ranks 1, 2" in str(failure)


def test_endlessly_computing_rank_is_named_and_stopped() -> None:
    stopped = threading.Event()

    def compute(world: World) -> None:
        try:
            while world.rank == 0:
                pass
        except SystemExit:
            stopped.set()
            raise

    failure = failure_of(compute, timeout_s=0.2)
    assert failure.rank == 0
    assert stopped.wait(60)  # on a busy machine


def test_long_communicating_rank_is_not_timed_out() -> None:
    def keep_going(world: World) -> int:
        deadline, rounds = time.monotonic() + 2.0, 0
        going = torch.ones(1)
        while going.item():
            time.sleep(0.02)
            going.fill_(time.monotonic() < deadline)
            comm.broadcast(going)
            rounds += 1
        return rounds

    rounds = World.mock(2, timeout_s=1.0).run(keep_going)
    assert rounds[0] == rounds[1] > 1


def test_endlessly_polling_ranks_time_out() -> None:
    def poll(world: World) -> None:
        work = dist.irecv(torch.zeros(1), 1 - world.rank)
        assert work is not None
        while not work.is_completed():
            pass

    failure = failure_of(poll, size=2, timeout_s=0.3)
    assert isinstance(failure.__cause__, TimeoutError)


def test_mismatched_collective_leaves_world_usable() -> None:
    def recover(world: World) -> list[float]:
        with pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(2 if world.rank else 3))
        return comm.all_reduce_sum(torch.ones(2)).tolist()

    assert World.mock(3).run(recover) == [[3.0, 3.0]] * 3


def test_mismatched_collective_reaches_later_ranks_at_once() -> None:
    arrived: list[int] = []

    def differ(world: World) -> None:
        if world.rank == 2:
            assert arrived == [0, 1]
        arrived.append(world.rank)
        with pytest.raises(MismatchError, match=r"rank 0: all_reduce SUM of float32 \[3\]; rank 1"):
            dist.all_reduce(torch.ones(2 if world.rank else 3))

    World.mock(3).run(differ)
