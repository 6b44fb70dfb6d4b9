from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import axonlaunch as ax
from axonlaunch import comm
from axonlaunch.comm import Backend, RankFailedError, ReduceOp
from axonlaunch.comm.checks.mismatch_check import LINE_BYTES, pack, unpack
from axonlaunch.comm.connection import nccl
from axonlaunch.system import gpus


def test_backend_names_equal_configuration_names() -> None:
    assert [str(backend) for backend in Backend] == ["gloo", "nccl", "mock"]
    assert [op.name for op in ReduceOp] == ["Sum", "Product", "Min", "Max", "Average"]


def test_public_names_of_comm_are_sorted_and_exist() -> None:
    assert comm.__all__ == sorted(comm.__all__)
    assert all(hasattr(comm, name) for name in comm.__all__)


@pytest.mark.slow
def test_importing_comm_has_no_side_effects() -> None:
    text = (
        "import sys, axonlaunch.comm, axonlaunch.comm.mock\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        "heavy = ('torch._dynamo', 'torch.testing._internal.distributed')\n"
        "print(*[name for name in sys.modules if name.startswith(heavy)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        env={"PYTHONPATH": str(comm.__path__[0]) + "/../.."},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == ""


def test_nccl_reports_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    status = nccl.status()
    assert (status.available, status.version, status.devices) == (False, None, [])
    assert f"this torch ({torch.__version__}) is built without NCCL: install" in status.reason


def test_nccl_reports_node_without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(gpus, "devices", list)
    status = nccl.status()
    assert (status.available, status.version) == (False, "2.27.3")
    assert "this torch has NCCL 2.27.3, but sees no device" in status.reason


def test_nccl_reports_usable_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    devices = [gpus.Device(f"device {index}", 80 * 2**30, f"{index}") for index in range(2)]
    monkeypatch.setattr(gpus, "devices", lambda: devices)
    status = nccl.status()
    assert status == nccl.NcclStatus(True, "2.27.3", ["device 0", "device 1"])
    assert status.reason == ""
    with pytest.raises(FrozenInstanceError):
        status.available = False


def test_nccl_reports_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[gpus.Device]:
        raise RuntimeError("CUDA unknown error - this may be due to an incorrect environment\nmore")

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(gpus, "devices", fail)
    status = nccl.status()
    assert not status.available
    assert status.reason.endswith(
        "CUDA fails: CUDA unknown error - this may be due to an incorrect environment"
    )


def test_devices_are_counted_in_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # If this process initialized CUDA, it could not fork processes that compute.
    here = os.getpid()

    def properties(index: int) -> SimpleNamespace:
        assert os.getpid() != here
        return SimpleNamespace(
            name=f"H100 {index}", total_memory=2**36, uuid=f"uuid-{index}", major=9, minor=0
        )

    monkeypatch.setattr(gpus, "has_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "of this test")  # part of the cache's key
    assert gpus.devices() == [
        gpus.Device("H100 0", 2**36, "uuid-0", has_bf16=True, has_fp8=True),
        gpus.Device("H100 1", 2**36, "uuid-1", has_bf16=True, has_fp8=True),
    ]


def test_nccl_check_works_in_current_process() -> None:
    status = nccl.status()
    assert status.available == bool(status.devices) == (status.reason == "")


def test_a_failed_rank_can_be_reported_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(RankFailedError(3, "rank 3 failed: ValueError: boom")))
    assert (error.rank, str(error)) == (3, "rank 3 failed: ValueError: boom")


@pytest.mark.parametrize("line", ["", "barrier", "a" * LINE_BYTES, "\u00e9" * 100])
def test_packed_line_round_trips(line: str) -> None:
    assert unpack(pack(line)) == line


def test_long_lines_that_differ_at_the_end_are_distinguished() -> None:
    unpacked, other = (unpack(pack("x" * LINE_BYTES + end)) for end in ("a", "b"))
    assert unpacked != other
    assert len(unpacked) == LINE_BYTES


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gloo", Backend.GLOO),
        ("mock", Backend.MOCK),
        ("fake", Backend.MOCK),
        ("nccl", Backend.NCCL),
        ("cpu:gloo,cuda:nccl", Backend.NCCL),
        ("cuda:nccl", Backend.NCCL),
    ],
)
def test_torch_backend_name_maps_to_transport(name: str, backend: Backend) -> None:
    assert Backend.of_torch(name) is backend


def test_nccl_world_supports_cpu_tensors() -> None:
    assert Backend.NCCL.torch_name == "cpu:gloo,cuda:nccl"
    assert Backend.of_torch(Backend.NCCL.torch_name) is Backend.NCCL


def test_unknown_torch_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="ucc"):
        Backend.of_torch("ucc")


@pytest.mark.skipif(nccl.status().available, reason="NCCL can be used here")
def test_nccl_world_without_nccl_is_nccl_error() -> None:
    status = ax.nccl.status()
    assert not status.available
    assert status.devices == []
    assert (status.version is None) == (not dist.is_nccl_available())
    with pytest.raises(ax.NcclError) as caught:
        ax.World.init(backend="nccl")
    assert str(caught.value) == f"backend=nccl: {status.reason}"
    assert isinstance(caught.value, (ax.CommError, ValueError))
