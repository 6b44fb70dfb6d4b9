"""Limits of cgroups count as the memory of a node, in both versions and in nested groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonlaunch.system.node import cgroup_memory, host

GIB = 1 << 30


def group(folder: Path, *, limit: str, used: int, dropped: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {dropped}\n")


def member_of(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    return root


def test_limit_of_the_smallest_cgroup_above_a_process_counts(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/job/step")
    cgroups = tmp_path / "sys/fs/cgroup"
    group(cgroups / "job", limit=str(3 * GIB), used=2 * GIB, dropped=GIB // 2, version=2)
    group(cgroups / "job/step", limit="max", used=GIB, dropped=0, version=2)
    assert cgroup_memory.limit_bytes(tmp_path) == 3 * GIB
    assert cgroup_memory.free_limit_bytes(tmp_path) == 3 * GIB - (2 * GIB - GIB // 2)


def test_limit_of_version_1_in_a_container_that_has_only_its_own_folder(tmp_path: Path) -> None:
    member_of(tmp_path, "7:cpu:/docker/ab", "4:cpuset,memory:/docker/ab", "0::/")
    group(tmp_path / "sys/fs/cgroup/memory", limit=str(GIB), used=GIB, dropped=9, version=1)
    assert cgroup_memory.limit_bytes(tmp_path) == GIB
    assert cgroup_memory.free_limit_bytes(tmp_path) == 9


def test_no_limit_and_no_cgroups_limit_nothing(tmp_path: Path) -> None:
    assert cgroup_memory.limit_bytes(tmp_path) is None
    member_of(tmp_path, "4:memory:/", "0::/../above", "garbage")
    group(
        tmp_path / "sys/fs/cgroup/memory", limit=str((1 << 63) - 4096), used=1, dropped=0, version=1
    )
    assert cgroup_memory.limit_bytes(tmp_path) is None
    assert cgroup_memory.free_limit_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/job", "job/memory.events"), ("4:memory:/job", "memory/job/memory.oom_control")],
)
def test_processes_that_the_kernel_killed_for_memory_are_counted(
    line: str, file: str, tmp_path: Path
) -> None:
    member_of(tmp_path, line)
    assert cgroup_memory.oom_kills(tmp_path) == 0
    counts = tmp_path / "sys/fs/cgroup" / file
    counts.parent.mkdir(parents=True)
    counts.write_text("oom 7\noom_kill 2\noom_group_kill 0\n")
    assert cgroup_memory.oom_kills(tmp_path) == 2


def test_memory_of_a_node_is_at_most_what_cgroups_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup_memory, "limit_bytes", lambda: 12345)
    monkeypatch.setattr(cgroup_memory, "free_limit_bytes", lambda: 0)
    assert host.memory_bytes() == 12345
    assert host.free_memory_bytes() == 0


def test_earlier_kills_are_forgotten_and_new_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now, kills = [0.0], [1]
    monkeypatch.setattr(cgroup_memory, "oom_kills", lambda: kills[0])
    monkeypatch.setattr(cgroup_memory.time, "monotonic", lambda: now[0])
    recent = cgroup_memory.RecentKills()
    assert not recent.exist()
    kills[0] = 2
    for now[0] in (6.0, 7.0):
        recent.tick()
        assert recent.exist()
    for now[0] in (12.0, 18.0):
        recent.tick()
    assert not recent.exist()
