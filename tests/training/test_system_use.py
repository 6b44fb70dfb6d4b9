"""The first rank of each node samples it while it trains, at a bounded cost, and writes events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.logged_runs import train

from axonlaunch.training import worker
from axonlaunch.training.measuring import system_use
from axonlaunch.training.measuring.system_use import SystemUse, gpus_of_node, sample_system

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def samples(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "system"]


def after(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_node_is_sampled_while_training_and_not_later(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.touch()
    with sample_system(tmp_path, rank=0, device=CPU, ranks=1, interval_s=0.05):
        after(lambda: len(samples(tmp_path)) >= 2)
    written = samples(tmp_path)
    time.sleep(0.2)
    assert samples(tmp_path) == written
    last = written[-1]
    assert 0 <= last["cpu"] <= 1
    assert 0 < last["memory_bytes"] < last["memory_total_bytes"]
    assert last["received_bytes_per_s"] >= 0
    assert len(json.dumps(last)) < 300


def test_costly_samples_are_taken_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of 2 ms allows the next one after 2 s."""

    def compute() -> int:
        deadline = time.thread_time() + 0.002
        while time.thread_time() < deadline:
            pass
        return 0

    monkeypatch.setattr(system_use.host, "free_memory_bytes", compute)
    (tmp_path / "events.jsonl").touch()
    with sample_system(tmp_path, rank=0, device=CPU, ranks=1, interval_s=0.01):
        after(lambda: len(samples(tmp_path)) >= 1)
        time.sleep(0.5)
    assert len(samples(tmp_path)) == 1


def test_gpus_are_means_and_figures_that_the_driver_refuses_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(device: int) -> float:
        raise RuntimeError("not supported by this MIG slice")

    reads = iter([20, 40, 60, 80])  # of GPUs 0 and 1, twice
    queries = {"gpu_use": (lambda device: next(reads), 1e-2), "gpu_power_w": (refuse, 1e-3)}
    monkeypatch.setattr(system_use, "_GPU", queries)
    use = SystemUse([0, 1])
    use.sample()
    use.sample()
    figures = use.take()
    assert figures["gpu_use"] == [0.4, 0.6]
    assert "gpu_power_w" not in figures


@pytest.mark.parametrize(
    ("device", "ranks", "visible", "indices"),
    [(CPU, 8, 8, []), (CUDA, 4, 8, [0, 1, 2, 3]), (CUDA, 4, 2, [0, 1]), (CUDA, 8, 1, [0])],
)
def test_gpus_of_the_ranks_are_read(
    device: torch.device,
    ranks: int,
    visible: int,
    indices: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system_use.gpus, "device_count", lambda: visible)
    assert gpus_of_node(device, ranks) == indices


def test_run_writes_samples_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "sample_system", partial(sample_system, interval_s=0.001))
    train(tmp_path / "run", "train.steps=4", ranks=2)
    assert samples(tmp_path / "run")
    assert not list((tmp_path / "run").glob("logs/*"))  # the second rank of a node samples nothing


def test_another_node_writes_beside_the_log_of_its_first_rank(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    file = tmp_path / "logs/rank_8.events.jsonl"
    with sample_system(tmp_path, rank=8, device=CPU, ranks=8, interval_s=0.01):
        after(file.exists)
    assert json.loads(file.read_text().splitlines()[0])["event"] == "system"
    assert not (tmp_path / "events.jsonl").exists()
