"""What to do about a failure, where that is known."""

from __future__ import annotations

import dataclasses
import resource
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

from axonlaunch.config import ConfigError, RunConfig, with_values
from axonlaunch.config.data import TokensConfig
from axonlaunch.config.documents import TextRowsConfig
from axonlaunch.config.hardware import GIB, HardwareConfig
from axonlaunch.config.layout import nodes
from axonlaunch.launch import run_dir
from axonlaunch.launch.failures.report import Report
from axonlaunch.planning.estimate import cached_estimate, forecast, prepared, suggest_changes
from axonlaunch.system.cache import cache_folder
from axonlaunch.system.disk import free_bytes
from axonlaunch.system.formatting import size


def hint(report: Report, config: RunConfig, context: ForkServerContext | None = None) -> str:
    """Return what to do about a failure; empty where it is not known.

    Args:
        report: Of the rank that failed first.
        config: The run's.
        context: Of the warm fork server, by which memory is estimated.
    """
    cause, _, rest = report.cause.partition(" ")
    if cause == "memory":
        return _memory(report, config, context)
    if cause == "disk":
        folder, free = free_bytes(Path(config.run_dir))
        return (
            f"the disk of {folder} has {free / GIB:.2f} GiB free; free some space, or use another "
            "run_dir, checkpoint.keep_last=1 or a larger checkpoint.every"
        )
    if cause == "files":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"a process may have {soft:,} files open at once (ulimit -n; at most {hard:,} here): "
            "have the administrator raise it, or use fewer ranks on this node (launch.nproc)"
        )
    if cause == "folder":
        return (
            "was it deleted or renamed, or its disk unmounted? What was not saved elsewhere "
            "(checkpoint.path) is lost; the same command starts from step 0"
        )
    if cause == "loss":
        last = run_dir.last_saved(config)
        resumes = f"; with name={config.name} it resumes from step {last.step}" if last else ""
        return (
            "use a lower optimizer.lr, more scheduler.warmup_steps or train.grad_clip"
            f"{resumes}; train.log_every=1 finds the step at which it begins"
        )
    if cause == "module":
        return (
            f"{rest} is not installed for {sys.executable}; pip install it there, on every "
            "node of the run"
        )
    if cause == "refused":
        launch = config.launch
        if nodes(config)[1] == 1:
            return "nothing listens there; is a service that the model or the data needs running?"
        return (
            f"nothing listens at {launch.master_addr}:{launch.master_port}; is that node 0's "
            "address, and does a firewall let its port through?"
        )
    if report.reason.startswith("killed by SIGBUS"):
        return _bus_error(config)
    if cause == "types" and config.train.precision == "bf16":
        return (
            "train.precision=bf16: a forward reads weights in bf16, and something in fp32, as a "
            "table that is no parameter, was added to what it computes or multiplied with it; "
            "cast that in the model, table.to(x.dtype), or use train.precision=fp32"
        )
    return ""


def _bus_error(config: RunConfig) -> str:
    """Name the files that a rank maps, and say what to do after one of them was shortened."""
    files, again = (
        "weights that it was loading",
        "the same command goes on from the last checkpoint",
    )
    if isinstance(config.data, TextRowsConfig):
        files = f"tokens in {config.data.cache_dir or cache_folder() / 'tokens'}"
        again += ", and makes tokens again that were changed"
    elif isinstance(config.data, TokensConfig):
        files = f"data.path={config.data.path}"
    return (
        f"a file that the rank had mapped was shortened while it was read ({files}), or its disk "
        f"failed, or /dev/shm is full; leave such files alone while a run reads them: {again}"
    )


def _memory(report: Report, config: RunConfig, context: ForkServerContext | None) -> str:
    """Say what the highest rank needs beside what it had, and the smallest changes that fit."""
    had = report.memory_bytes
    there = "" if had is None else f"; there were {size(had)} for it"
    if context is None:
        return f"axonlaunch estimate shows what each rank needs{there}"
    hardware = config.hardware or HardwareConfig(name="device")
    if config.launch.device != "cuda":  # on no GPU no allocator has a cache, nor CUDA a context
        hardware = HardwareConfig(name="cpu")
    config = dataclasses.replace(config, hardware=hardware)
    try:
        estimate = cached_estimate(context, config)
        fits = had is not None and estimate.process_bytes < had
        # Where the estimate says that it fits, less is still what is asked for.
        memory = int(0.9 * estimate.process_bytes) if fits or had is None else had
        asked = with_values(hardware, {"memory_gib": memory / GIB})
        smaller = prepared(context, dataclasses.replace(config, hardware=asked))
        changes = [*suggest_changes(context, smaller, forecast(context, smaller))]
    except (ConfigError, RuntimeError, OSError) as error:
        return f"axonlaunch estimate shows what each rank needs{there} ({error})"
    highest = max(estimate.ranks, key=lambda rank: rank.peak_bytes)
    breakdown = ", ".join(
        f"{name} {size(part)}" for name, part in highest.breakdown.items() if part
    )
    ways = "".join(f"\n  {' '.join(change.overrides)}" for change in changes[:3])
    less = f"\nsmallest changes that need less:{ways}" if ways else ""
    return f"the highest rank needs {size(estimate.process_bytes)} ({breakdown}){there}{less}"
