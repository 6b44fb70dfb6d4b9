"""``ulimit -v`` counts when a rank runs out of memory: the report names the address space limit."""

from __future__ import annotations

import errno
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from axonlaunch import config
from axonlaunch.diagnostics.out_of_memory import is_out_of_memory
from axonlaunch.launch.failures import hints
from axonlaunch.launch.failures.report import Report
from axonlaunch.preflight.devices import memory_of_a_rank
from axonlaunch.system.node import cgroup_memory, host, limits
from axonlaunch.training.measuring.peak_memory import available_to_rank

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks the device there")
def test_memory_available_to_rank_is_limited_by_ulimit_v(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [int(number) for number in Path("/proc/self/statm").read_text().split()[:2]]
    mapped, resident = (number * os.sysconf("SC_PAGE_SIZE") for number in pages)
    monkeypatch.setattr(limits, "address_space", lambda: mapped + 100 * MIB)
    assert abs(available_to_rank(1) - (resident + 100 * MIB)) < 50 * MIB
    monkeypatch.setattr(limits, "address_space", lambda: mapped // 2)
    assert abs(available_to_rank(1) - resident) < 50 * MIB


def test_ulimit_v_is_read_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (6000 * 1024, resource.RLIM_INFINITY))
    assert limits.address_space() == 6000 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert limits.address_space() is None


def test_the_hint_of_an_out_of_memory_error_names_ulimit_v(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = config.with_values(config.load([]), {"launch.device": "cpu"})
    report = Report(rank=0, kind="error", reason="", cause="memory", memory_bytes=700 * MIB)
    monkeypatch.setattr(limits, "address_space", lambda: 6000 * MIB)
    assert hints.hint(report, loaded) == (
        "axonlaunch estimate shows what each rank needs; 700 MiB were available (ulimit -v limits "
        "the address space of a process to 5.86 GiB, including its libraries and threads; ulimit "
        "-v unlimited removes the limit)"
    )
    monkeypatch.setattr(limits, "address_space", lambda: None)
    monkeypatch.setattr(cgroup_memory, "limit_bytes", lambda: 3 << 30)
    assert hints.hint(report, loaded).endswith(
        "; 700 MiB were available (a cgroup, as of a container or a job, limits all processes to "
        "3 GiB)"
    )
    gpu = config.with_values(loaded, {"launch.device": "cuda"})
    killed = replace(report, reason="killed by SIGKILL; the kernel ended it because memory ran out")
    assert hints.hint(killed, gpu).startswith(
        "the memory of the host ran out, not that of a GPU (a cgroup, as of a container or a job, "
        "limits all processes to 3 GiB); use fewer data.workers, "
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("mmap failed: Cannot allocate memory"),
    ],
)
def test_a_refused_mapping_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_cpu_memory_of_rank_is_limited_by_ulimit_v(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = config.load(["launch.device=cpu", "launch.nproc=1"])
    monkeypatch.setattr(limits, "address_space", lambda: 6000 * MIB)
    monkeypatch.setattr(host, "memory_bytes", lambda: 8000 * MIB)
    limited = memory_of_a_rank(loaded)
    assert limited == (6000 * MIB, "the address space of a process (ulimit -v)")
    monkeypatch.setattr(limits, "address_space", lambda: 9000 * MIB)
    assert memory_of_a_rank(loaded) == (8000 * MIB, "a rank's share of this node's memory")
