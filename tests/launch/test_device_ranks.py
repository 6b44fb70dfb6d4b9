"""Ranks with an accelerator: joining, failing, and reporting memory."""

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
from support.configured import run_config

from axonlaunch.comm import World
from axonlaunch.diagnostics.flight_recorder import Record
from axonlaunch.launch.failures import hang
from axonlaunch.launch.failures.hints import hint
from axonlaunch.launch.failures.report import Report
from axonlaunch.launch.local import rank_error, rank_process
from axonlaunch.launch.local.heartbeat import HeartbeatTable
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.system.authentication import Credentials
from axonlaunch.training.measuring.peak_memory import DevicePeak


class _DeafWorld:
    """A world with peers that wait in a collective: closing it takes NCCL's time limit."""

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

    monkeypatch.setattr(rank_process, "join_world", lambda config, rank_spec: _DeafWorld())
    monkeypatch.setattr(rank_process.worker, "run", train)
    [report] = _reports_of_a_rank(tmp_path)
    assert (report.kind, report.cause) == ("error", "memory")
    assert report.reason.startswith("OutOfMemoryError: CUDA out of memory.")


@pytest.mark.parametrize(("stages", "at_once"), [(1, True), (2, False)])
def test_ranks_of_a_pipeline_connect_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: int, at_once: bool
) -> None:
    monkeypatch.setattr(rank_process, "_store", lambda rank_spec, waits_s: None)
    monkeypatch.setattr(rank_process.os, "environ", {})
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(World, "join", lambda rank_spec, **options: joined.append(options))
    config = run_config([f"strategy.pipeline.degree={stages}", "launch.nproc=2"])
    rank_process.join_world(config, _place(tmp_path))
    assert [options["connects_at_once"] for options in joined] == [at_once]


@pytest.mark.parametrize(
    ("deterministic", "settings", "expected"),
    [
        (False, {}, {}),
        (True, {}, {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"}),
        (True, {"NCCL_ALGO": "Tree"}, {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Tree"}),
        (False, {"NCCL_PROTO": "Simple"}, {"NCCL_PROTO": "Simple"}),
    ],
    ids=["not asked for", "asked for", "the user's own algorithm", "what else NCCL reads"],
)
def test_deterministic_runs_use_only_nccl_rings(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    deterministic: bool,
    settings: dict[str, str],
    expected: dict[str, str],
) -> None:
    environ = dict(settings)
    monkeypatch.setattr(rank_process, "_store", lambda rank_spec, waits_s: None)
    monkeypatch.setattr(rank_process.os, "environ", environ)
    recorded: list[dict[str, str]] = []  # at the time that NCCL reads it
    read = lambda: {k: v for k, v in environ.items() if k.startswith("NCCL_")}  # noqa: E731
    monkeypatch.setattr(World, "join", lambda rank_spec, **options: recorded.append(read()))
    config = run_config([f"train.deterministic={deterministic}", "launch.nproc=2"])
    rank_process.join_world(config, _place(tmp_path))
    assert recorded == [expected]


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
    config, rank_spec = run_config(["launch.nproc=1"]), _place(folder)
    ours, sender = Pipe(duplex=False)
    arguments = (pickle.dumps(config), rank_spec, sender)
    rank = multiprocessing.get_context("fork").Process(target=rank_process.main, args=arguments)
    rank.start()
    sender.close()
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
def test_failure_text_separates_local_and_peer_failures(
    error: Exception, kind: str, cause: str
) -> None:
    assert ("connection" if rank_error._is_connection(error) else "error") == kind
    assert rank_error._cause(error) == cause


def test_a_model_that_mixes_types_gets_a_hint_at_bf16() -> None:
    report = Report(rank=0, kind="error", reason="", cause="types")
    assert "table.to(x.dtype)" in hint(report, run_config(["train.precision=bf16"]))
    assert hint(report, run_config(["train.precision=fp16"])) == ""  # under autocast


def test_measured_peak_excludes_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, log = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", log.append)
    peak = DevicePeak(cuda)
    for _ in range(3):
        with peak.step(cast("Any", None)):
            log.append("step")
    assert log == ["step", cuda, "step", "step"]


def test_flight_record_is_waited_for_after_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's recorder asks the device which operations are done, which takes longer than a
    stack.
    """
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
