"""Diagnoses this node with tests in forked processes, whose failures do not end this process."""

from __future__ import annotations

import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.options.hardware import GIB
from axonlaunch.diagnostics.doctor import measured_hardware
from axonlaunch.system.processes import forked_call, forkserver
from axonlaunch.system.processes.forked_process import reason_of
from axonlaunch.system.processes.temporary_folders import temporary_folder
from axonlaunch.system.storage.disk import free_bytes

_CPU_RANKS = 2
"""Number of ranks in the benchmark of a CPU, by default."""


def diagnose(
    run_folder: Path,
    *,
    measures: bool = False,
    ranks: int | None = None,
    write: Path | None = None,
) -> dict[str, Any]:
    """Return this node's hardware, which backends work, and the free disk space at a folder.

    Args:
        run_folder: Folder for runs; it need not exist.
        measures: Whether to benchmark the GPUs, or the CPU of a node without GPUs.
        ranks: Number of ranks in the benchmark; None for one on each GPU, or two on a CPU.
        write: File for the figures of GPUs; None if none is written.

    Raises:
        ConfigError: There are fewer GPUs than ranks, or --write is given without a GPU.
    """
    with forkserver.warm() as context:
        target = "axonlaunch.diagnostics.doctor.machine:machine"
        report: dict[str, Any] = forked_call.call(context, target, task="inspecting this node")
        if write is not None and not report["devices"]:
            message = "is for GPUs, and this node has none; hardware=cpu measures its CPU"
            raise ConfigError([ConfigIssue("--write", message, str(write))])
        backends = {"gloo": _try_processes(context, "gloo", 2), "mock": _try_mock(context)}
        if report["nccl"]["available"] and report["devices"]:
            backends["nccl"] = _try_processes(context, "nccl", min(2, len(report["devices"])))
        else:
            backends["nccl"] = {"works": False, "reason": report["nccl"]["reason"]}
        if report["devices"]:
            report["gpus"] = _gpus(context)
        if measures:
            report |= _measure(context, run_folder, gpus=len(report["devices"]), ranks=ranks)
    report["backends"] = backends
    report["run_folder"] = str(run_folder.absolute())
    report["disk_free_gib"] = round(free_bytes(run_folder)[1] / GIB, 1)
    return report


def _measure(
    context: ForkServerContext, run_folder: Path, *, gpus: int, ranks: int | None
) -> dict[str, Any]:
    """Return ``measured``, figures of the CPU, or ``timed``, the benchmark of the GPUs."""
    count = ranks or gpus or _CPU_RANKS
    if not gpus:
        measured = measured_hardware.measure_hardware(context, ranks=count)
        return {"measured_ranks": count, "measured": measured}
    if count > gpus:
        message = f"is more than this node's GPUs; use at most {gpus}"
        raise ConfigError([ConfigIssue("--ranks", message, count)])
    with temporary_folder() as folder:
        calls = [
            (rank, count, str(folder / "store"), str(free_bytes(run_folder)[0]))
            for rank in range(count)
        ]
        results = forked_call.call_together(
            context,
            "axonlaunch.diagnostics.doctor.gpu_benchmarks:run_gpu_benchmarks",
            calls,
            task="measuring the GPUs of this node",
        )
    return {"measured_ranks": count, "timed": slowest(results)}


def slowest(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the benchmarks of all GPUs: the longest time of each work, and the most memory.

    Work that one of them could not do, such as writing to a disk, is left out.
    """
    by_sizes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        for timed in result["timed"]:
            sizes = tuple(value for key, value in timed.items() if key != "seconds")
            by_sizes.setdefault(sizes, []).append(timed)
    longest = [
        max(same, key=lambda timed: timed["seconds"])
        for same in by_sizes.values()
        if len(same) == len(results)
    ]
    names = ("context_bytes", "communicator_bytes")
    largest = {name: max(result[name] for result in results) for name in names}
    return {**results[0], **largest, "timed": longest}


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
