"""Diagnoses this machine by trying, in forked processes, so that a failure stays there."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch.disk import free_bytes
from axonlaunch.launch import forkserver

GIB = 1024**3


def diagnose(run_folder: Path) -> dict[str, Any]:
    """Return what this machine has, which backends work, and the free disk at a folder.

    Args:
        run_folder: Where runs are to be written; it need not exist.
    """
    with forkserver.warm() as context:
        report: dict[str, Any] = forkserver.call(context, "axonlaunch.diagnosis:machine")
        backends = {"gloo": _try_processes(context, "gloo", 2), "mock": _try_mock(context)}
        if report["nccl"]["available"] and report["devices"]:
            backends["nccl"] = _try_processes(context, "nccl", min(2, len(report["devices"])))
        else:
            backends["nccl"] = {"works": False, "reason": report["nccl"]["reason"]}
    report["backends"] = backends
    report["run_folder"] = str(run_folder.absolute())
    report["disk_free_gib"] = round(free_bytes(run_folder)[1] / GIB, 1)
    return report


def _try_processes(context: ForkServerContext, backend: str, ranks: int) -> dict[str, Any]:
    target = "axonlaunch.diagnosis:try_rank"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        store = str(Path(folder) / "store")
        calls = [
            pool.submit(forkserver.call, context, target, backend, rank, ranks, store)
            for rank in range(ranks)
        ]
        return _verdict([_outcome(call) for call in calls], ranks, started)


def _try_mock(context: ForkServerContext) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        answers: list[Any] = [forkserver.call(context, "axonlaunch.diagnosis:try_mock", 2)]
    except Exception as error:  # whatever fails is the diagnosis
        answers = [error]
    return _verdict(answers, 2, started)


def _outcome(call: Any) -> Any:
    try:
        return call.result()
    except Exception as error:  # whatever fails is the diagnosis
        return error


def _verdict(answers: list[Any], ranks: int, started: float) -> dict[str, Any]:
    seconds = round(time.perf_counter() - started, 2)
    wrong = [answer for answer in answers if answer != ranks]
    if not wrong:
        return {"works": True, "ranks": ranks, "seconds": seconds}
    reason = wrong[0]
    if isinstance(reason, Exception):
        reason = f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"
    else:
        reason = f"an all-reduce of ones over {ranks} ranks gave {reason}"
    return {"works": False, "ranks": ranks, "reason": reason}
