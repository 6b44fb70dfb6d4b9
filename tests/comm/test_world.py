"""``World.init`` from the environment."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonlaunch import comm
from axonlaunch.comm import Backend, World, world
from axonlaunch.comm.connection.rendezvous import (
    RankEnvironment,
    find_place,
    is_loopback,
    local_place,
)
from axonlaunch.comm.world import choose_backend
from axonlaunch.system import gpus

SET = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node-7",
    "MASTER_PORT": "29500",
}


# The environment.


def test_empty_environment_is_world_of_one() -> None:
    environment = find_place({})
    assert (
        environment.rank,
        environment.world_size,
        environment.local_rank,
        environment.is_single,
    ) == (0, 1, 0, True)
    assert environment.on_loopback


def test_rank_is_read_from_environment() -> None:
    assert find_place(SET) == RankEnvironment(
        rank=1,
        world_size=4,
        local_rank=0,
        master_addr="node-7",
        master_port=29500,
        is_single=False,
    )


def test_local_ranks_are_read_from_launcher_variables() -> None:
    assert find_place({**SET, "LOCAL_WORLD_SIZE": "2"}).local_world_size == 2
    assert find_place(SET).local_world_size is None


def test_a_rank_that_joins_by_value_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SET, "WORLD_SIZE": "two"}.items():
        monkeypatch.setenv(name, value)
    environment = RankEnvironment(rank=0, world_size=1, master_addr="127.0.0.1", is_single=False)
    with World.join(environment, backend="gloo", store=dist.HashStore()) as world:
        assert (world.rank, world.world_size) == (0, 1)


def test_all_environment_errors_are_reported_together() -> None:
    with pytest.raises(ValueError, match="the environment describes no world") as caught:
        find_place({"WORLD_SIZE": "two", "LOCAL_RANK": "-1", "MASTER_PORT": "70000"})
    for problem in (
        "RANK is not set",
        "MASTER_ADDR is not set",
        "WORLD_SIZE='two' is not a whole number from 1",
        "LOCAL_RANK='-1' is not a whole number from 0",
        "MASTER_PORT=70000 is not below 65536",
        "with none of them set this is a world of one",
    ):
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"LOCAL_RANK": "9"}, "LOCAL_RANK=9 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number from 1"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"RANK": "1.0"}, "RANK='1.0' is not a whole number from 0"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        find_place({**SET, **change})


def test_world_with_store_needs_no_address() -> None:
    store = dist.HashStore()
    without = {name: value for name, value in SET.items() if not name.startswith("MASTER")}
    assert find_place(without, store=store).world_size == 4
    assert find_place({"MASTER_ADDR": "node-7"}, store=store).is_single


def test_loopback_store_makes_loopback_world() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    without = {name: value for name, value in SET.items() if not name.startswith("MASTER")}
    assert find_place(without, store=dist.PrefixStore("run", store)).on_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("node-7", False),
        ("0.0.0.0", False),
    ],
)
def test_loopback_is_recognized_by_name_or_address(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


# The backend.


def _on_loopback(*, world_size: int) -> RankEnvironment:
    return RankEnvironment(
        local_rank=1, world_size=world_size, master_addr="localhost", is_single=False
    )


def _on_node_7(*, local_world_size: int | None) -> RankEnvironment:
    return RankEnvironment(
        local_rank=1,
        world_size=8,
        local_world_size=local_world_size,
        master_addr="node-7",
        is_single=False,
    )


@pytest.mark.parametrize(
    ("devices", "environment", "expected"),
    [
        (4, _on_loopback(world_size=4), "nccl"),
        (2, _on_loopback(world_size=4), "gloo"),
        (2, _on_node_7(local_world_size=4), "gloo"),
        (4, _on_node_7(local_world_size=4), "nccl"),
        (2, _on_node_7(local_world_size=None), "nccl"),
        (1, RankEnvironment(), "nccl"),
        (1, _on_node_7(local_world_size=4), "nccl"),  # a scheduler gives each task one device
        (1, _on_loopback(world_size=4), "gloo"),
    ],
)
def test_auto_is_nccl_where_every_local_rank_has_a_device(
    monkeypatch: pytest.MonkeyPatch, devices: int, environment: RankEnvironment, expected: str
) -> None:
    monkeypatch.setattr(gpus, "device_count", lambda: devices)
    assert choose_backend("auto", environment) == expected


def test_auto_is_gloo_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "device_count", lambda: 0)
    assert choose_backend("auto", RankEnvironment()) is Backend.GLOO


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend=mpi: there is no such backend; use auto, gloo"):
        World.init(backend="mpi")
    with pytest.raises(ValueError, match=r"that only World.mock\(world_size\).run\(fn\) starts"):
        World.init(backend="mock")
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a device")
def test_nccl_without_support_is_error_with_reason() -> None:
    with pytest.raises(ValueError, match=r"backend=nccl: this torch .*NCCL"):
        World.init(backend="nccl")


def test_nccl_with_more_ranks_than_devices_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "device_count", lambda: 2)
    for name, value in {**SET, "LOCAL_RANK": "2", "RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="LOCAL_RANK=2 has no device, this process sees 2"):
        World.init(backend="nccl")


@pytest.mark.parametrize(("num_visible", "index"), [(1, 0), (8, 3)])
def test_a_rank_that_sees_one_device_takes_it(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, index: int
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(gpus, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    # Without it, torch's device mesh would use the local rank's device, invisible to some tasks.
    monkeypatch.setattr(torch.cuda, "init", lambda: taken.append("initialized"))
    assert world._device(Backend.NCCL, 3) == torch.device("cuda", index)
    assert taken == [index, "initialized"]


@pytest.mark.parametrize("at_once", [True, False])
def test_nccl_connects_all_ranks_at_once_or_each_pair_on_its_first_message(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    class JoinedError(Exception):
        pass

    def init(*args: object, **kwargs: object) -> None:
        raise JoinedError(kwargs["device_id"])

    monkeypatch.setattr(gpus, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    environment, store = local_place(0, 1), dist.HashStore()
    with pytest.raises(JoinedError) as joined:
        World.join(environment, backend="nccl", store=store, connects_at_once=at_once)
    assert joined.value.args == (torch.device("cuda", 0) if at_once else None,)


@pytest.mark.parametrize(("backend", "destroyed"), [(Backend.NCCL, 0), (Backend.GLOO, 1)])
def test_an_error_on_nccl_destroys_no_communicator(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, destroyed: int
) -> None:
    # It would wait for peers that wait for this rank, and the error would appear minutes later.
    calls: list[None] = []
    with World.init(backend="gloo") as is_single:
        is_single.backend = backend
        with monkeypatch.context() as spied:
            spied.setattr(is_single, "close", lambda: calls.append(None))
            with pytest.raises(torch.OutOfMemoryError), is_single:
                raise torch.OutOfMemoryError("CUDA out of memory")
        assert len(calls) == destroyed


def test_groups_of_a_mesh_wait_as_long_as_the_world() -> None:
    with World.init(backend="gloo", timeout_s=77.0) as is_single:
        group = is_single.mesh(dp_shard=1, tp=1).device_mesh.get_group("tp")
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


# A world of one, in this process.


def test_a_world_of_one_needs_no_port_and_leaves_nothing() -> None:
    variables, hook = dict(os.environ), sys.excepthook
    for _ in range(2):
        with World.init() as world:
            assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
            assert world.device == torch.device("cpu")
            assert world.new_group([0]).ranks == (0,)
            with pytest.raises(ValueError, match=r"already has a world"):
                World.init()
        world.close()
        assert not dist.is_initialized()
        assert dict(os.environ) == variables
        assert sys.excepthook is hook
        with pytest.raises(ValueError, match=r"the world of the group \[0\] is closed"):
            comm.barrier(world.default_group)


def test_failed_join_leaves_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        values = {**SET, "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        variables = dict(os.environ)
        with pytest.raises(ValueError, match=f"MASTER_PORT={port}: rank 0 can't listen on 127"):
            World.init()
    assert dict(os.environ) == variables
    assert not dist.is_initialized()


def test_a_time_limit_is_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s=-1: must be more than 0 seconds"):
        World.init(timeout_s=-1)


def test_world_repr_is_readable() -> None:
    with World.init() as world:
        assert repr(world) == (
            "World(rank=0, local_rank=0, world_size=1, device='cpu', backend='gloo')"
        )
        assert repr(world.default_group) == "ProcessGroup(ranks=[0], rank=0)"


def test_group_of_other_backend_is_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "ucc")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="has the torch backend 'ucc'; expected one of gloo"):
            comm.barrier()
    finally:
        dist.destroy_process_group()
