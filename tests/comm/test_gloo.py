"""An attacker at a gloo port can't replace a rank unnoticed, and the port is closed afterwards.

``axonlaunch/comm/connection/gloo.py`` replaces the name ``ProcessGroupGloo`` in
``torch.distributed.distributed_c10d`` while a world lives. If the last tests here fail after an
update of torch, look at how ``_new_process_group_helper`` creates its groups now.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from axonlaunch.comm import World
from axonlaunch.comm.connection import gloo
from axonlaunch.comm.errors import UnreachableRankError
from axonlaunch.system.authentication import derive_key

Run = Callable[..., list[tuple[int | None, str]]]

WORLD = """
import os, socket, struct, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from axonlaunch.system.authentication import Credentials
from axonlaunch.comm import World, all_reduce_sum
from axonlaunch.comm.connection import gloo
from axonlaunch.comm.connection.authenticated_store import AuthenticatedStore

HELD = []
RANK = int(os.environ["RANK"])
key = bytes(32)
"""
START = """
inner = dist.FileStore("store", 2)
own = Credentials(key=key, run="run", sender=f"rank {RANK}")
try:
    with World.init(timeout_s=600, store=AuthenticatedStore(inner, own)) as world:
        print("total", int(all_reduce_sum(torch.ones(1)).item()))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
sys.stdout.flush()
inner.set(f"over/{RANK}", "")
inner.wait(["over/0", "over/1"])  # who leaves first would look like one who does not answer
os._exit(0)
"""
ROBBED = """
gloo.DEADLINE_S = 3.0

class Robbed(gloo._Listeners):
    def __init__(self):
        super().__init__()
        host, port = self.addresses[0].split(":")
        for number in range(8):  # gloo's numbers of the connections that it waits for
            HELD.append(socket.create_connection((host, int(port))))
            HELD[-1].sendall(struct.pack("<q", number))
        time.sleep(0.3)

gloo._Listeners = Robbed  # of both: which one listens depends on their addresses
"""
NOISE = """
import random

class Noisy(gloo._Listeners):
    def __init__(self):
        super().__init__()
        host, port = self.addresses[0].split(":")
        chance = random.Random(RANK)
        for count in range(2_000):
            one = socket.create_connection((host, int(port)))
            if count % 3:
                one.sendall(chance.randbytes(chance.randint(1, 300)))
            if count % 20 == 0:
                HELD.append(one)
            else:
                one.close()

gloo._Listeners = Noisy
"""


def test_forged_gloo_rank_ends_start_and_names_rank(
    run_ranks: Run,
) -> None:
    (_, first), (_, second) = run_ranks(WORLD + ROBBED + START)
    assert "UnreachableRankError: rank 0 could not reach rank 1 over gloo: " in first
    assert "another program connected to 127.0.0.1:" in first
    assert "UnreachableRankError: rank 1 could not reach rank 0 over gloo: " in second


def test_gloo_rank_without_key_is_refused(run_ranks: Run) -> None:
    pretender = """
if RANK == 1:
    gloo._prove = lambda group, store, challenge, key, **rest: original(
        group, store, challenge, bytes(range(32)), **rest)
"""
    patient = "gloo.DEADLINE_S = 80.0\n"  # only reached on a busy machine
    (_, first), (_, second) = run_ranks(
        WORLD + "original = gloo._prove\n" + pretender + patient + START
    )
    assert "the connection to it answered without the run's key" in first
    assert "total" not in first + second


@pytest.mark.slow
def test_noise_at_both_ports_while_ranks_connect_does_no_harm(run_ranks: Run) -> None:
    outcomes = run_ranks(WORLD + NOISE + START)
    assert [text.split() for _, text in outcomes] == [["total", "2"]] * 2


def test_gloo_missing_rank_is_waited_for_until_timeout() -> None:
    with pytest.raises(dist.DistStoreError):
        gloo.connect(
            dist.HashStore(),
            0,
            2,
            timeout=timedelta(seconds=0.5),
            world_rank=0,
            key=derive_key(b""),
        )


def test_gloo_rank_with_deleted_store_keys_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "_CHECK_INTERVAL", timedelta(seconds=0.1))
    store, is_over = dist.HashStore(), threading.Event()

    def erase() -> None:
        while not is_over.wait(0.01):
            store.delete_key("came/1")

    stranger = threading.Thread(target=erase)
    stranger.start()
    try:
        with pytest.raises(UnreachableRankError, match=r"rank 3 could not be reached: .* deleted"):
            gloo.connect(store, 1, 2, timeout=timedelta(minutes=5), world_rank=3, key=bytes(32))
    finally:
        is_over.set()
        stranger.join()


def test_every_gloo_group_is_authenticated_and_its_port_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[list[str]] = []

    class Listeners(gloo._Listeners):
        def __init__(self) -> None:
            super().__init__()
            groups.append(self.addresses)

    monkeypatch.setattr(gloo, "_Listeners", Listeners)
    with World.init():
        dist.new_group([0])
        dist.init_device_mesh("cpu", (1,))
        assert len(groups) >= 2
        assert all(len(addresses) == 1 for addresses in groups)
        for [address] in groups:
            host, port = address.split(":")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)), timeout=5)


def test_torch_accepts_authenticated_gloo_group() -> None:
    with World.init():
        group = dist.group.WORLD
        assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        distributed_c10d._set_pg_timeout(timedelta(seconds=5), group)
    assert distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo


COPIES = """
from pathlib import Path
from axonlaunch.comm.torch_internals import all_gather_single, reduce_scatter_single

MIB = 40  # from 32 on malloc gives memory back at once
wholes = [torch.ones(MIB << 18) for _ in range(3)]
half = torch.ones(MIB << 17)

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024 / MIB

def more(function):
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    function()
    dist.barrier()
    return round(resident("VmHWM") - before, 1)

def several():
    for work in [all_gather_single(whole, half, async_op=True) for whole in wholes]:
        work.wait()

with World.init(timeout_s=600, store=dist.FileStore("store", 2)):
    gathers = more(lambda: all_gather_single(wholes[0], half)), more(several)
    print(*gathers, more(lambda: reduce_scatter_single(half, wholes[0])))
"""


def test_gloo_copies_buffers_that_estimates_count(run_ranks: Run) -> None:
    # If this fails, planning/tracing/devices/gloo_buffers.py counts buffers that no longer exist.
    for status, printed in run_ranks(WORLD + COPIES):
        assert status == 0, printed
        one, several, scattered = map(float, printed.split())
        assert [one, scattered] == pytest.approx([1.0, 1.0], abs=0.25)
        assert 1.0 < several < 2.25  # depends on its two threads, but never three
