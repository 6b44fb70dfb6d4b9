"""The copy for a save in the background, made from a simulated GPU."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import estimate_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving import saver, staging
from axonlaunch.checkpoint.saving.dcp_writer import Writer
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.checkpoint.saving.staging import HostCopies
from axonlaunch.comm import World
from axonlaunch.engines.optimizer import streaming
from axonlaunch.models.tensors.dtensor_regions import dtensor_of
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.planning.reports.workload import host_memory

META = torch.device("meta")
"""Replaces a GPU: its tensors are not on the host, and can be copied."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the calls to the simulated GPU."""
    requests: list[str] = []

    def page_locked(tensor: torch.Tensor) -> torch.Tensor:
        requests.append(f"lock {tensor.nbytes}")
        assert tensor.is_contiguous()
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(staging, "page_locked", page_locked)
    monkeypatch.setattr(staging, "_wait", lambda device: requests.append(f"wait for {device}"))
    copy: Any = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if other.is_meta:
            requests.append("copy" if non_blocking else "copy and wait")
            return self
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    return requests


def state(rows: int = 4) -> dict[str, Any]:
    weights = {name: torch.empty(rows, 2, device=META) for name in ("a", "b")}
    return {"model": weights, "optimizer": {"a.exp_avg": torch.empty(rows, 2, device=META)}}


def test_gpu_state_reuses_buffers_and_synchronizes_once(log: list[str]) -> None:
    copies = HostCopies()
    first = copies.copy(state())
    assert log == ["lock 32", "copy"] * 3 + ["wait for meta"]
    log.clear()
    second = copies.copy(state())
    assert log == ["copy"] * 3 + ["wait for meta"]
    buffer, again = first["optimizer"]["a.exp_avg"], second["optimizer"]["a.exp_avg"]
    assert buffer.data_ptr() == again.data_ptr()
    log.clear()
    copies.copy(state(rows=5))  # as fully_shard does when it replaces shards
    assert log.count("lock 40") == 3


def test_saver_reuses_host_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    def async_save(state: Any, *, storage_writer: Writer, **_: Any) -> Future[None]:
        storage_writer.stage(state)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(saver.dcp, "async_save", async_save)

    def run(world: World) -> None:
        saves = Saver(tmp_path, world=world, retention=Retention(newest=9), background=True)
        for step in (1, 2):
            saves.save(state(), step=step, samples=step)

    World.mock(1).run(run)
    assert [line for line in log if "lock" in line] == ["lock 32"] * 3


def test_cpu_state_is_copied_to_new_memory(log: list[str]) -> None:
    copies, original = HostCopies(), {"model": {"a": torch.ones(3)}}
    copied = copies.copy(original)["model"]["a"]
    original["model"]["a"].zero_()
    assert copied.tolist() == [1.0] * 3
    assert log == []


# Host shards of tensors that are divided over GPUs.


@pytest.fixture
def gpus() -> DeviceMesh:
    return DeviceMesh("cuda", [0], mesh_dim_names=("dp",), _init_backend=False, _rank=0)  # type: ignore[call-arg]


def test_offloaded_shard_stays_in_host_memory(gpus: DeviceMesh) -> None:
    part = torch.ones(3, 2)
    sharded = dtensor_of(part, gpus, [Replicate()], shape=(3, 2), stride=(2, 1))
    assert sharded.to_local().data_ptr() == part.data_ptr()
    assert (sharded.shape, sharded.stride(), sharded.dtype) == ((3, 2), (2, 1), part.dtype)
    # Builds with and without CUDA raise different errors; if neither raises, delete dtensor_of.
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        DTensor.from_local(part, gpus, [Replicate()], run_check=False)


def test_offloaded_dtensor_is_not_copied_to_the_gpu(gpus: DeviceMesh) -> None:
    part = torch.empty(3, 2, device=META)
    on_device = dtensor_of(part, gpus, [Replicate()], shape=(3, 2), stride=(2, 1))
    moved = streaming.moved(on_device, META)
    assert moved is on_device
    host = dtensor_of(torch.ones(3, 2), gpus, [Replicate()], shape=(3, 2), stride=(2, 1))
    assert streaming.moved(host, META).to_local().is_meta


# Host memory of a save.


def test_estimate_counts_host_copies() -> None:
    breakdown: Any = {"parameters": 100, "optimizer": 200, "activations": 1000}
    of_rank = RankEstimate(rank=0, coords={}, peak_bytes=1300, host_bytes=7, breakdown=breakdown)
    estimate = Estimate(2, {}, 1, 1300, 1300, 1300, [of_rank])
    arguments = ["launch.nproc=2", "hardware=h100_80gb"]
    saved = ["checkpoint.every=5", "checkpoint.async_save=true"]
    for overrides, per_rank in (([], 7), (saved[:1], 7), (saved, 307)):
        memory = host_memory(estimate_config([*arguments, *overrides]), estimate)
        assert memory is not None
        assert memory.bytes_per_rank == per_rank
