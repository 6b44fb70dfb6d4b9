"""Advice about failures with a known cause."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

from axonlaunch.config import ConfigError, RunConfig, with_values
from axonlaunch.config.consistency.layout import nodes
from axonlaunch.config.options.data import TokensConfig
from axonlaunch.config.options.documents import TextRowsConfig
from axonlaunch.config.options.hardware import GIB, HardwareConfig
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.launch.failures.report import Report
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.planning.estimate import (
    cached_estimate,
    forecast,
    resolve_for_node,
    suggest_changes,
)
from axonlaunch.system.node import cgroup_memory, limits
from axonlaunch.system.storage.cache import cache_folder
from axonlaunch.system.storage.disk import free_bytes, shortage
from axonlaunch.system.text.formatting import size


def hint(report: Report, config: RunConfig, context: ForkServerContext | None = None) -> str:
    """Return advice about a failure; empty if the cause is unknown.

    Args:
        report: Report of the rank that failed first.
        config: Configuration of the run.
        context: Context of the warm fork server, which estimates memory; None gives no estimate.
    """
    cause, _, rest = report.cause.partition(" ")
    if cause == "memory":
        if config.launch.device == "cuda" and report.reason.startswith("killed by SIGKILL"):
            return _host_memory()
        return _memory(report, config, context)
    if cause == "module":
        return (
            f"{rest} is not installed for {sys.executable}; pip install it there, on every "
            "node of the run"
        )
    if advice := _ADVICE.get(cause):
        return advice(config)
    return _bus_error(config) if report.reason.startswith("killed by SIGBUS") else ""


def _full_disk(config: RunConfig) -> str:
    folder, _ = free_bytes(Path(config.run_dir))
    left, remedy = shortage(folder)
    return (
        f"the disk of {folder} has {left}; {remedy}, or use another "
        "run_dir, checkpoint.keep_last=1 or a larger checkpoint.every"
    )


def _open_files(config: RunConfig) -> str:
    del config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"a process may have {soft:,} files open at once (ulimit -n; at most {hard:,} here): "
        "have the administrator raise it, or use fewer ranks on this node (launch.nproc)"
    )


def _lost_folder(config: RunConfig) -> str:
    del config
    return (
        "was it deleted or renamed, or its disk unmounted? What was not saved elsewhere "
        "(checkpoint.path) is lost; the same command starts from step 0"
    )


def _nonfinite_loss(config: RunConfig) -> str:
    last = finished_runs.last_saved(config)
    resumes = f"; with name={config.name} it resumes from step {last.step}" if last else ""
    return (
        "use a lower optimizer.lr, more scheduler.warmup_steps or train.grad_clip"
        f"{resumes}; train.log_every=1 finds the step at which it begins"
    )


def _refused_connection(config: RunConfig) -> str:
    if nodes(config)[1] == 1:
        return "nothing listens there; is a service that the model or the data needs running?"
    return (
        f"nothing listens at {config.launch.master_addr}:{config.launch.master_port}; is that node "
        "0's address, and does a firewall let its port through?"
    )


def _different_types(config: RunConfig) -> str:
    precision = PRECISIONS[config.train.precision]
    if precision.replica_arithmetic != "copies":
        return ""
    return (
        f"train.precision={precision.name}: weights are {precision.name} in a forward, but "
        "the model combines them with an fp32 tensor, such as a table that is not a parameter; "
        "cast it in the model, table.to(x.dtype), or use train.precision=fp32"
    )


_ADVICE: dict[str, Callable[[RunConfig], str]] = {
    "disk": _full_disk,
    "files": _open_files,
    "folder": _lost_folder,
    "loss": _nonfinite_loss,
    "refused": _refused_connection,
    "types": _different_types,
}
"""Maps causes that need only the configuration to functions that return the advice."""


def _bus_error(config: RunConfig) -> str:
    """Return advice for a SIGBUS, with the files that a rank maps and that may have shrunk."""
    files, again = (
        "weights that it was loading",
        "the same command goes on from the last checkpoint",
    )
    if isinstance(config.data, TextRowsConfig):
        files = f"tokens in {config.data.cache_dir or cache_folder() / 'tokens'}"
        again += " and tokenizes changed files again"
    elif isinstance(config.data, TokensConfig):
        files = f"data.path={config.data.path}"
    return (
        f"a file that the rank had mapped was shortened while it was read ({files}), or its disk "
        f"failed, or /dev/shm is full; do not change such files while a run reads them: {again}"
    )


def _host_memory() -> str:
    return (
        f"the memory of the host ran out, not that of a GPU{_cgroup_limit()}; use fewer "
        "data.workers, or keep less there: strategy.fsdp.cpu_offload=none, and no "
        "train.activation_checkpointing=offload"
    )


def _cgroup_limit() -> str:
    """Return the memory limit of this process's cgroups in parentheses; empty without."""
    allowed = cgroup_memory.limit_bytes()
    if allowed is None:
        return ""
    return f" (a cgroup, as of a container or a job, limits all processes to {size(allowed)})"


def _memory(report: Report, config: RunConfig, context: ForkServerContext | None) -> str:
    """Compare the memory that the largest rank needs with the available memory.

    The advice includes the smallest changes that fit.
    """
    available = report.memory_bytes
    note = "" if available is None else f"; {size(available)} were available"
    limit = limits.address_space()
    if limit is not None and config.launch.device != "cuda":
        note += (
            f" (ulimit -v limits the address space of a process to {size(limit)}, including its "
            "libraries and threads; ulimit -v unlimited removes the limit)"
        )
    if config.launch.device != "cuda":
        note += _cgroup_limit()
    if context is None:
        return f"axonlaunch estimate shows what each rank needs{note}"
    hardware = config.hardware or HardwareConfig(name="device")
    if config.launch.device != "cuda":  # without CUDA there is no allocator cache and no context
        hardware = HardwareConfig(name="cpu")
    config = dataclasses.replace(config, hardware=hardware)
    try:
        estimate = cached_estimate(context, config)
        fits = available is not None and estimate.process_bytes < available
        # If the run should have fit, look for changes that need 10% less than the estimate.
        memory = int(0.9 * estimate.process_bytes) if fits or available is None else available
        target = with_values(hardware, {"memory_gib": memory / GIB})
        smaller = resolve_for_node(context, dataclasses.replace(config, hardware=target))
        changes = [*suggest_changes(context, smaller, forecast(context, smaller))]
    except (ConfigError, RuntimeError, OSError) as error:
        return f"axonlaunch estimate shows what each rank needs{note} ({error})"
    highest = max(estimate.ranks, key=lambda rank: rank.peak_bytes)
    breakdown = ", ".join(
        f"{name} {size(part)}" for name, part in highest.breakdown.items() if part
    )
    overrides = "".join(f"\n  {' '.join(change.overrides)}" for change in changes[:3])
    advice = f"\nsmallest changes that need less:{overrides}" if overrides else ""
    return f"the highest rank needs {size(estimate.process_bytes)} ({breakdown}){note}{advice}"
