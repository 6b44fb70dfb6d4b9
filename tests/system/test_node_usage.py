"""Counters of a node are those of the kernel's files, of hardware where there is any."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from axonlaunch.system.node.usage import NodeCounters, NodeUsage

NETWORK = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets
    lo:  900  1 0 0 0 0 0 0  900 1 0 0 0 0 0 0
  eth0:  100  1 0 0 0 0 0 0   50 1 0 0 0 0 0 0
docker0: 40  1 0 0 0 0 0 0   20 1 0 0 0 0 0 0
"""


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    write(tmp_path / "proc/stat", "cpu  30 5 15 100 20 1 2 7 30 0\ncpu0 1 1\n")
    write(tmp_path / "proc/net/dev", NETWORK)
    for disk, sectors in (("nvme0n1", 10), ("loop0", 1000)):
        write(tmp_path / f"sys/block/{disk}/stat", f"1 0 {sectors} 0 1 0 {2 * sectors} 0 0 0 0")
    (tmp_path / "sys/block/nvme0n1/device").mkdir()
    return tmp_path


def test_counters_are_those_of_hardware_without_loopback_and_loop_devices(node: Path) -> None:
    (node / "sys/class/net/eth0/device").mkdir(parents=True)
    assert NodeUsage(node).read() == NodeCounters(
        busy=60,  # all but idle and waiting for a disk; time of guests is part of the user's
        ticks=180,
        disk_read_bytes=5120,
        disk_written_bytes=10240,
        received_bytes=100,
        sent_bytes=50,
    )


def test_container_without_hardware_counts_its_network_interfaces(node: Path) -> None:
    counters = NodeUsage(node).read()
    assert counters is not None
    assert (counters.received_bytes, counters.sent_bytes) == (140, 70)


def test_infiniband_counts_words_of_four_bytes(node: Path) -> None:
    (node / "sys/class/net/eth0/device").mkdir(parents=True)
    for direction, words in (("rcv", 1000), ("xmit", 500)):
        port = node / "sys/class/infiniband/mlx5_0/ports/1/counters"
        write(port / f"port_{direction}_data", f"{words}\n")
    counters = NodeUsage(node).read()
    assert counters is not None
    assert (counters.received_bytes, counters.sent_bytes) == (4100, 2050)


def test_use_is_a_fraction_of_the_cores_and_bytes_per_second() -> None:
    names = ("disk_read_bytes", "disk_written_bytes", "received_bytes", "sent_bytes")
    earlier = NodeCounters(busy=10, ticks=100, **dict.fromkeys(names, 100))
    later = NodeCounters(busy=40, ticks=200, **dict(zip(names, (300, 100, 200, 0), strict=True)))
    assert later.since(earlier, seconds=2.0) == {
        "cpu": 0.3,
        "disk_read_bytes_per_s": 100,
        "disk_written_bytes_per_s": 0,
        "received_bytes_per_s": 50,
        "sent_bytes_per_s": 0,  # the interface was removed
    }


def test_system_without_proc_has_no_counters(tmp_path: Path) -> None:
    assert NodeUsage(tmp_path).read() is None


def test_computing_counts_as_busy_on_this_node() -> None:
    usage = NodeUsage()
    earlier = usage.read()
    if earlier is None:
        pytest.skip("this system has no /proc")
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        sum(range(1000))
    after = usage.read()
    assert after is not None
    assert after.busy - earlier.busy >= 20  # ticks of 10 ms
