"""Diagnoses this node with tests in forked processes, whose failures do not end this process."""

from __future__ import annotations

import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch.config.options.hardware import GIB
from axonlaunch.diagnostics.doctor import measured_hardware
from axonlaunch.system.processes import forked_call, forkserver
from axonlaunch.system.processes.forked_process import reason_of
from axonlaunch.system.processes.temporary_folders import temporary_folder
from axonlaunch.system.storage.disk import free_bytes


def diagnose(run_folder: Path, *, ranks: int | None = None) -> dict[str, Any]:
    """Return this node's hardware, which backends work, and the free disk space at a folder.

    Args:
        run_folder: Folder for runs; it need not exist.
        ranks: Number of ranks in the benchmark for ``hardware=cpu``; None skips the benchmark.
    """
    with forkserver.warm() as context:
        target = "axonlaunch.diagnostics.doctor.machine:machine"
        report: dict[str, Any] = forked_call.call(context, target, task="inspecting this node")
        backends = {"gloo": _try_processes(context, "gloo", 2), "mock": _try_mock(context)}
        if report["nccl"]["available"] and report["devices"]:
            backends["nccl"] = _try_processes(context, "nccl", min(2, len(report["devices"])))
        else:
            backends["nccl"] = {"works": False, "reason": report["nccl"]["reason"]}
        if report["devices"]:
            report["gpus"] = _gpus(context)
        if ranks is not None:
            report |= {
                "measured_ranks": ranks,
                "measured": measured_hardware.measure_hardware(context, ranks=ranks),
            }
    report["backends"] = backends
    report["run_folder"] = str(run_folder.absolute())
    report["disk_free_gib"] = round(free_bytes(run_folder)[1] / GIB, 1)
    return report


def _gpus(context: ForkServerContext) -> dict[str, Any]:
    """Return NVML's report and the speed of links; each is measured in a separate process."""
    report: dict[str, Any] = forked_call.call(
        context, "axonlaunch.diagnostics.doctor.gpus:nvml_report", task="reading GPUs from NVML"
    )
    try:
        links = forked_call.call(
            context, "axonlaunch.diagnostics.doctor.gpus:link_report", task="copying between GPUs"
        )
    except (RuntimeError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        failed = f"copying between GPUs failed: {first}"
        links = {"links": [], "problems": [failed], "topology": [], "unreachable": []}
    problems = report["problems"] + links["problems"]
    if not report["topology"]:  # NVML did not report one
        report["topology"], problems = links["topology"], problems + links["unreachable"]
    return {**report, "links": links["links"], "problems": problems}


def _try_processes(context: ForkServerContext, backend: str, ranks: int) -> dict[str, Any]:
    with temporary_folder() as folder:
        store = str(folder / "store")
        calls = [(backend, rank, ranks, store) for rank in range(ranks)]
        return _try(context, "axonlaunch.diagnostics.doctor.machine:try_rank", calls, ranks)


def _try_mock(context: ForkServerContext) -> dict[str, Any]:
    return _try(context, "axonlaunch.diagnostics.doctor.machine:try_mock", [(2,)], 2)


def _try(
    context: ForkServerContext, target: str, calls: list[tuple[Any, ...]], ranks: int
) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        results = forked_call.call_together(context, target, calls, task="testing a backend")
    except forked_call.CallsFailedError as error:
        results = [*error.errors.values()]
    return _verdict(results, ranks, started)


def _verdict(results: list[Any], ranks: int, started: float) -> dict[str, Any]:
    seconds = round(time.perf_counter() - started, 2)
    wrong = [result for result in results if result != ranks]
    if not wrong:
        return {"works": True, "ranks": ranks, "seconds": seconds}
    reason = wrong[0]
    if isinstance(reason, Exception):
        reason = reason_of(reason).partition("\n")[0]
    else:
        reason = f"an all-reduce of ones over {ranks} ranks returned {reason}"
    return {"works": False, "ranks": ranks, "reason": reason}
