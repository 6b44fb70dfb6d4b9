"""Worlds of real processes: listening ports, launchers, and the effects of a death."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import axonlaunch.comm
from axonlaunch import comm
from axonlaunch.comm import World

Run = Callable[..., list[tuple[int, str]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


LISTENING = """
import os
from pathlib import Path

def listening():
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if link.exists()]
    inodes = {name[8:-1] for name in opened if name.startswith("socket:[")}
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists()
            for row in table.read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
"""

JOIN = f"""
{LISTENING}
import torch
from axonlaunch import comm

with comm.World.init(timeout_s=30) as world:
    group = world.new_group([0, 1])
    total = comm.all_reduce_sum(torch.ones(1), group=group).item()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    print(world.rank, world.backend, interface, int(total), *sorted(listening()))
    comm.barrier()
print(*listening())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_world_has_no_network_listener(run_ranks: Run, host: str) -> None:
    outcomes = run_ranks(JOIN, MASTER_ADDR=host, MASTER_PORT=str(free_port()))
    for rank, (status, text) in enumerate(outcomes):
        assert status == 0, text
        # Rank 0 listens only for the store: gloo's ports are closed once the ranks have connected.
        expected = "0 gloo lo 2 0100007F" if rank == 0 else "1 gloo lo 2"
        assert text.splitlines() == [expected, ""]


def test_closing_world_releases_port(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for _ in range(3):
        world = World.init()
        group = world.new_group([0])
        assert comm.all_reduce_sum(torch.ones(1), group=group).item() == 1
        world.close()


@pytest.mark.slow
def test_torchrun_starts_a_world(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, torch\n"
        "from axonlaunch import comm\n"
        "with comm.World.init(timeout_s=30) as world:\n"
        "    total = comm.all_reduce_sum(torch.ones(1)).item()\n"
        "    line = f'rank {world.rank} of {world.world_size}: {total}'\n"
        "    os.write(1, (line + chr(10)).encode())  # in one piece: both ranks write here\n"
    )
    package = str(Path(axonlaunch.comm.__file__).parents[2])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)),
        ],
        env={**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 2.0", "rank 1 of 2: 2.0"]


def test_a_process_that_dies_is_an_error_for_the_others(run_ranks: Run) -> None:
    text = (
        "import os, torch\n"
        "from axonlaunch import comm\n"
        "world = comm.World.init(timeout_s=30)\n"
        "if world.rank == 1:\n"
        "    os._exit(7)\n"
        "try:\n"
        "    comm.all_reduce_sum(torch.ones(2))\n"
        "except RuntimeError as error:\n"
        "    print('error:', error)\n"
        "os._exit(0)\n"
    )
    first, second = run_ranks(text, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert second[0] == 7
    assert first[0] == 0
    assert "onnection" in first[1]


UNEVEN_GROUPS = """
import torch
from axonlaunch import comm

def sums(mesh):
    mine = torch.full((1,), 10.0 ** world.rank)
    return [int(comm.all_reduce_sum(mine.clone(), group=mesh.group(axis)))
            for axis, size in mesh.sizes.items() if size > 1]

with comm.World.init(timeout_s=60) as world:
    for ranks in ([2], [0, 1, 3], [1, 2]):
        world.new_group(ranks)
    first = world.mesh(dp=2, tp=2)
    if world.rank == 1:
        world.mesh(dp=4, tp=1).group("tp").torch_group  # a group of one rank, created by it only
    print(sums(first), sums(world.mesh(pp=2, tp=2)), sums(world.mesh(cp=4)))
"""


def test_a_mesh_after_new_group_of_some_ranks_does_not_hang_on_gloo(run_ranks: Run) -> None:
    port = str(free_port())
    outcomes = run_ranks(UNEVEN_GROUPS, world_size=4, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for rank, (status, text) in enumerate(outcomes):
        assert status == 0, text
        along_dp, along_tp = [101, 1010][rank % 2], [11, 1100][rank // 2]
        assert text.splitlines() == [f"[{along_dp}, {along_tp}] " * 2 + "[1111]"]
