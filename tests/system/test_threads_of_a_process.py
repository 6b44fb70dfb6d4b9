"""The number of threads is that of OMP_NUM_THREADS, else a share of the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from axonlaunch.config import ConfigError, load
from axonlaunch.system.node import host


@contextmanager
def parent(**variables: str) -> Iterator[int]:
    """Start a process with these environment variables only, and yield its id."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


@pytest.mark.parametrize(("text", "threads"), [("3", 3), (" 5 ", 5), ("4,2", 4)])
def test_omp_num_threads_is_honored(
    monkeypatch: pytest.MonkeyPatch, text: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert host.threads(ranks=2) == host.requested_threads() == threads


@pytest.mark.parametrize("text", ["", None])
def test_cores_are_shared_without_omp_num_threads(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert host.requested_threads() is None
    assert [host.threads(ranks=ranks) for ranks in (1, 2, 8)] == [7, 3, 1]


@pytest.mark.parametrize(("of_torchrun", "requested"), [({}, None), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_the_one_thread_that_torchrun_sets_is_no_request(
    monkeypatch: pytest.MonkeyPatch, of_torchrun: dict[str, str], requested: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with parent(**of_torchrun) as process:
        monkeypatch.setattr(os, "getppid", lambda: process)
        assert host.requested_threads() == requested


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5"])
def test_a_wrong_omp_num_threads_is_refused_unless_threads_are_set(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ConfigError) as refused:
        load()
    assert str(refused.value) == (
        f"OMP_NUM_THREADS={text}: expected a number of threads, 1 or more; correct or unset this "
        "variable, or set launch.threads"
    )
    assert load(["launch.threads=2"]).launch.threads == 2
