"""Ranks are pinned to full cores near their devices, on simulated nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonlaunch.system.node.cores import cores_of_ranks

DGX = range(224)


@pytest.fixture
def dgx(tmp_path: Path) -> Path:
    """Simulate a DGX H100: two sockets of 56 cores with two threads each, and four GPUs on each."""
    nodes = {0: "0-55,112-167", 1: "56-111,168-223"}
    for number, processors in nodes.items():
        _write(tmp_path / f"devices/system/node/node{number}/cpulist", processors)
    for number in DGX:
        siblings = f"{number % 112},{number % 112 + 112}"
        topology = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        _write(topology / "thread_siblings_list", siblings)
    for index, bus in enumerate(("1b", "43", "52", "61", "9d", "c3", "d1", "df")):
        device = tmp_path / f"bus/pci/drivers/nvidia/0000:{bus}:00.0"
        _write(device / "local_cpulist", nodes[index // 4])
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_rank_is_pinned_to_full_cores_of_its_device_socket(dgx: Path) -> None:
    shares = cores_of_ranks(8, allowed=DGX, on_devices=True, system=dgx)
    assert shares is not None
    assert shares[1] == (*range(14, 28), *range(126, 140))
    assert shares[4] == (*range(56, 70), *range(168, 182))
    assert sorted(processor for share in shares for processor in share) == [*DGX]


@pytest.mark.parametrize(("visible", "socket"), [("4,5", 1), ("3,0", 0), (None, 0)])
def test_the_devices_are_those_that_are_visible(dgx: Path, visible: str, socket: int) -> None:
    shares = cores_of_ranks(2, allowed=DGX, on_devices=True, visible=visible, system=dgx)
    assert shares is not None
    assert {p % 112 // 56 for share in shares for p in share} == {socket}
    assert [len(share) for share in shares] == [56, 56]


@pytest.mark.parametrize("visible", ["GPU-5ebe9f43,GPU-ac33420d", "MIG-1,MIG-2", "0,9", "0", ""])
def test_devices_that_look_alike_leave_ranks_the_sockets_in_turn(dgx: Path, visible: str) -> None:
    shares = cores_of_ranks(2, allowed=DGX, on_devices=True, visible=visible, system=dgx)
    assert shares == cores_of_ranks(2, allowed=DGX, on_devices=False, system=dgx)
    assert shares is not None
    assert shares[0] == (*range(56), *range(112, 168))


def test_no_two_ranks_share_a_core_while_there_are_enough(dgx: Path) -> None:
    shares = cores_of_ranks(112, allowed=DGX, on_devices=False, system=dgx)
    assert shares is not None
    assert shares[3] == (3, 115)
    twice = cores_of_ranks(224, allowed=DGX, on_devices=False, system=dgx)
    assert twice is not None
    assert len({share for share in twice if len(share) == 1}) == 224


def test_only_devices_allowed_by_scheduler_are_used(dgx: Path) -> None:
    allowed = [*range(60, 64), *range(172, 176)]
    shares = cores_of_ranks(2, allowed=allowed, on_devices=True, visible="0,1", system=dgx)
    assert shares == [(60, 61, 172, 173), (62, 63, 174, 175)]


def test_a_node_that_shows_no_topology_is_cut_into_equal_runs(tmp_path: Path) -> None:
    shares = cores_of_ranks(2, allowed=range(5), on_devices=True, system=tmp_path)
    assert shares == [(0, 1), (2, 3)]
    assert cores_of_ranks(1, allowed=range(4), on_devices=False, system=tmp_path) is None
    assert cores_of_ranks(4, allowed=range(2), on_devices=False, system=tmp_path) is None
