"""What a node with accelerators makes of a run; its devices are made up, its processes real."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from configured import estimate_config, run_config

from axonlaunch.comm import Backend, World, world
from axonlaunch.config import ConfigError
from axonlaunch.diagnostics.flight_recorder import Record
from axonlaunch.launch.external.joining import devices_each
from axonlaunch.launch.failures import hang
from axonlaunch.launch.failures.hints import hint
from axonlaunch.launch.failures.report import Report
from axonlaunch.launch.local import rank_process
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.preflight import devices
from axonlaunch.system import gpus
from axonlaunch.system.authentication import Credentials
from axonlaunch.training.peak_memory import DevicePeak
from axonlaunch.training.worker import arithmetic_notes, device_notes

GIB = 2**30


def _have(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    devices = [gpus.Device("H100", 80 * GIB, f"uuid-{index}") for index in range(count)]
    monkeypatch.setattr(gpus, "devices", lambda: devices)


# Which backend.


@pytest.mark.parametrize(
    ("devices", "nproc", "asked", "backend", "device"),
    [
        (8, 8, "auto", "nccl", "cuda"),
        (8, 2, "auto", "nccl", "cuda"),
        (8, 2, "cuda", "nccl", "cuda"),
        (8, 2, "cpu", "gloo", "cpu"),
        (1, 2, "auto", "gloo", "cpu"),
        (1, 2, "cuda", "mock", "cuda"),  # they share it
        (0, 2, "auto", "gloo", "cpu"),
    ],
)
def test_ranks_are_given_the_backend_and_the_device_that_auto_stands_for(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    nproc: int,
    asked: str,
    backend: str,
    device: str,
) -> None:
    _have(monkeypatch, devices)
    launch = run_config([f"launch.nproc={nproc}", f"launch.device={asked}"]).launch
    assert (launch.backend, launch.device) == (backend, device)


@pytest.mark.parametrize(
    ("devices", "overrides", "message"),
    [
        (0, ["launch.device=cuda"], "launch.device=cuda: this node has no accelerator"),
        (0, ["launch.device=cuda", "launch.backend=gloo"], "launch.device=cuda: this node has no"),
        (8, ["launch.device=cpu", "launch.backend=nccl"], "launch.device=cpu: NCCL works on"),
        (
            1,
            ["launch.device=cuda", "launch.backend=gloo", "strategy=fsdp"],
            "launch.backend=gloo: gloo reduces and broadcasts tensors of a GPU, .* use mock",
        ),
    ],
)
def test_a_device_that_ranks_can_not_compute_on_is_refused(
    monkeypatch: pytest.MonkeyPatch, devices: int, overrides: list[str], message: str
) -> None:
    _have(monkeypatch, devices)
    with pytest.raises(ConfigError, match=message):
        run_config(["launch.nproc=2", *overrides])


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        (["launch.nproc=2"], 80),
        (["launch.nproc=4", "launch.device=cuda"], 20),  # threads share the first
        (["launch.nproc=4", "launch.device=cuda", "launch.backend=gloo", "strategy=ddp"], 40),
    ],
)
def test_ranks_that_share_a_device_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], gib: int
) -> None:
    _have(monkeypatch, 2)
    assert devices.memory_of_a_rank(run_config(overrides))[0] == gib * GIB


def test_an_estimate_leaves_the_backend_to_the_node_that_runs() -> None:
    assert estimate_config(["launch.nproc=2", "hardware=h100_80gb"]).launch.backend == "auto"


def test_more_ranks_than_devices_are_refused_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, 1)
    with pytest.raises(ConfigError, match="2 ranks need an accelerator each; this node has 1; use"):
        run_config(["launch.nproc=2", "launch.backend=nccl"])


def test_a_driver_that_fails_is_reported_rather_than_the_cpu_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> list[gpus.Device]:
        raise RuntimeError("CUDA unknown error\nmore")

    monkeypatch.setattr(gpus, "devices", fail)
    with pytest.raises(ConfigError, match="CUDA fails here: CUDA unknown error; repair it"):
        run_config(["launch.nproc=2"])
    assert run_config(["launch.nproc=2", "launch.device=cpu"]).launch.backend == "gloo"


@pytest.mark.parametrize(
    ("seen", "nproc", "each"),
    [
        ([["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]], 2, 2),
        ([["a"], ["b"], ["c"], ["d"]], 2, 2),  # --gpus-per-task=1
        ([["a"], ["a"], ["b"], ["b"]], 2, 1),  # two ranks share one
        ([["a", "b"], ["a", "b"], [], []], 2, 0),  # a node without
        ([["a"]], 1, 1),
    ],
)
def test_ranks_of_another_launcher_have_the_devices_that_each_of_them_sees(
    seen: list[list[str]], nproc: int, each: int
) -> None:
    assert devices_each(seen, nproc) == each


def test_a_run_on_the_cpu_of_a_node_with_devices_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axonlaunch.system.gpus.device_count", lambda: 2)
    [note] = device_notes(_world("cpu", "gloo"))
    assert "the ranks compute on the CPU, and rank 0 sees 2 devices" in note
    assert "launch.device=cuda launch.nproc=2" in note
    assert [*device_notes(_world("cpu", "mock"))] == [note]
    assert not [*device_notes(_world("cuda", "nccl"))]


def test_ranks_that_share_a_device_say_whose_memory_is_measured() -> None:
    [threads], [processes] = (device_notes(_world("cuda", name)) for name in ("mock", "gloo"))
    assert "ranks share cuda to be debugged on it" in threads
    assert threads.endswith("memory figures are those of all ranks")
    assert processes.endswith("memory figures are its own")


@pytest.mark.parametrize(
    ("overrides", "device", "capability", "is_noted"),
    [
        ([], "cuda", (9, 0), True),
        ([], "cuda", (7, 5), False),  # which has no TF32
        ([], "cpu", (9, 0), False),
        (["train.matmul_precision=high"], "cuda", (8, 0), False),
        (["train.precision=bf16"], "cuda", (8, 0), False),
    ],
)
def test_fp32_without_tensor_cores_is_noted_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    device: str,
    capability: tuple[int, int],
    is_noted: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    train = run_config(overrides).train
    notes = [*arithmetic_notes(train, torch.device(device))]
    assert ["train.matmul_precision=high" in note for note in notes] == [True] * is_noted


def test_ranks_on_gloo_are_dealt_out_to_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    devices_of_ranks = [world._device(Backend.GLOO, rank, asked="cuda") for rank in range(3)]
    assert devices_of_ranks == [torch.device("cuda", index) for index in (0, 1, 0)]
    assert done == [0, "init", 1, "init", 0, "init"]
    with pytest.raises(ValueError, match="backend=nccl, device=cpu: NCCL works on GPUs alone"):
        world._device(Backend.NCCL, 0, asked="cpu")


def _world(device: str, backend: str) -> World:
    about = {"device": torch.device(device), "backend": Backend(backend), "world_size": 2}
    return cast("World", SimpleNamespace(**about))


# A rank that fails.


class _DeafWorld:
    """A world whose peers wait in a collective: to close it takes the time limit of NCCL."""

    def __enter__(self) -> _DeafWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise AssertionError("it would wait for peers that wait for this rank")


def test_a_rank_reports_before_any_communicator_is_destroyed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(rank_process, "join_world", lambda config, place: _DeafWorld())
    monkeypatch.setattr(rank_process.worker, "run", train)
    [report] = _reports_of_a_rank(tmp_path)
    assert (report.kind, report.cause) == ("error", "memory")
    assert report.reason.startswith("OutOfMemoryError: CUDA out of memory.")


@pytest.mark.parametrize(("stages", "at_once"), [(1, True), (2, False)])
def test_ranks_of_a_pipeline_connect_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: int, at_once: bool
) -> None:
    monkeypatch.setattr(rank_process, "_store", lambda place, waits_s: None)
    monkeypatch.setattr(rank_process.os, "environ", {})
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(World, "join", lambda place, **options: joined.append(options))
    config = run_config([f"strategy.pipeline.degree={stages}", "launch.nproc=2"])
    rank_process.join_world(config, _place(tmp_path))
    assert [options["connects_at_once"] for options in joined] == [at_once]


@pytest.mark.parametrize(
    ("deterministic", "own", "expected"),
    [
        (False, {}, {}),
        (True, {}, {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"}),
        (True, {"NCCL_ALGO": "Tree"}, {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Tree"}),
        (False, {"NCCL_PROTO": "Simple"}, {"NCCL_PROTO": "Simple"}),
    ],
    ids=["not asked for", "asked for", "the user's own algorithm", "what else NCCL reads"],
)
def test_where_runs_are_to_repeat_nccl_adds_up_in_rings_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    deterministic: bool,
    own: dict[str, str],
    expected: dict[str, str],
) -> None:
    environ = dict(own)
    monkeypatch.setattr(rank_process, "_store", lambda place, waits_s: None)
    monkeypatch.setattr(rank_process.os, "environ", environ)
    seen: list[dict[str, str]] = []  # when NCCL reads it
    read = lambda: {k: v for k, v in environ.items() if k.startswith("NCCL_")}  # noqa: E731
    monkeypatch.setattr(World, "join", lambda place, **options: seen.append(read()))
    config = run_config([f"train.deterministic={deterministic}", "launch.nproc=2"])
    rank_process.join_world(config, _place(tmp_path))
    assert seen == [expected]


def _place(folder: Path) -> RankSpec:
    return RankSpec(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        port=0,
        credentials=Credentials.random(sender="rank 0"),
        listener=None,
        log=folder / "rank0.log",
        heartbeats=HeartbeatTable.of(1),
        threads=1,
        cores=None,
    )


def _reports_of_a_rank(folder: Path) -> list[Report]:
    config, place = run_config(["launch.nproc=1"]), _place(folder)
    ours, theirs = Pipe(duplex=False)
    arguments = (pickle.dumps(config), place, theirs)
    rank = multiprocessing.get_context("fork").Process(target=rank_process.main, args=arguments)
    rank.start()
    theirs.close()
    sent = []
    with contextlib.suppress(EOFError):
        while True:
            sent.append(ours.recv())
    rank.join()
    assert rank.exitcode == 1
    return sent


TYPES, OTHER = ("error", "types"), ("error", "")


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected : rank 1"), "error", ""),
        (
            dist.DistBackendError("NCCL error: unhandled cuda error, out of memory"),
            "error",
            "memory",
        ),
        (dist.DistBackendError("ncclRemoteError: remote process exited"), "connection", ""),
        (dist.DistBackendError("Connection closed by remote peer node-3"), "connection", ""),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), "connection", ""),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "error", "memory"),
        (RuntimeError("CUDA error: out of memory"), "error", "memory"),
        (ValueError("the text says out of memory"), "error", ""),
        (
            RuntimeError("mat1 and mat2 must have the same dtype, but got Float and BFloat16"),
            *TYPES,
        ),
        (RuntimeError("expected scalar type Float but found BFloat16"), *TYPES),
        (RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double"), *OTHER),
    ],
)
def test_a_failure_is_of_this_rank_or_of_a_peer_by_its_text(
    error: Exception, kind: str, cause: str
) -> None:
    assert ("connection" if rank_process._is_connection(error) else "error") == kind
    assert rank_process._cause(error) == cause


def test_a_model_that_mixes_types_is_told_what_bf16_means() -> None:
    report = Report(rank=0, kind="error", reason="", cause="types")
    assert "table.to(x.dtype)" in hint(report, run_config(["train.precision=bf16"]))
    assert hint(report, run_config(["train.precision=fp16"])) == ""  # under autocast


# Its memory.


def test_the_peak_is_that_of_the_second_step_and_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, log = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", log.append)
    peak = DevicePeak(cuda)
    for _ in range(3):
        with peak.step(cast("Any", None)):
            log.append("step")
    assert log == ["step", cuda, "step", "step"]


def test_the_record_of_a_rank_whose_stack_has_come_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's recorder asks the device what is done, for longer than a stack takes."""
    log = tmp_path / "rank_0.log"
    log.write_text("")
    stack = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/x/axonlaunch/launch/local/rank_process.py", line 1 in main\n'
    )
    written = iter([stack, *[""] * 5, f"{hang._PREFIX}{Record(begun={}, open=()).to_json()}\n"])

    def sleep(seconds: float) -> None:
        with log.open("a") as stream:
            stream.write(next(written, ""))

    monkeypatch.setattr(hang, "_ANSWER_S", 2.0)
    clock = SimpleNamespace(sleep=sleep, monotonic=itertools.count().__next__)
    monkeypatch.setattr(hang, "time", clock)
    monkeypatch.setattr(hang.os, "kill", lambda pid, number: None)
    assert hang.ask({0: os.getpid()}, {0: log})[0].record is not None
