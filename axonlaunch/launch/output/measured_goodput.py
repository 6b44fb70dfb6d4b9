"""Compares the goodput of a run that has ended with the goodput predicted from its hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axonlaunch.checkpoint.format import step_folders
from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.consistency.layout import nodes, num_ranks
from axonlaunch.diagnostics.report.record.run_record import NotARunError, RunRecord, read_run
from axonlaunch.diagnostics.report.record.run_timeline import device_seconds
from axonlaunch.diagnostics.report.record.wall_time import WallTime, wall_time
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.planning.throughput.goodput import overheads
from axonlaunch.planning.throughput.run_hardware import hardware_of_run
from axonlaunch.planning.throughput.training_time import (
    assumed_rates,
    failure_rates,
    save_costs,
)


def goodput_of_run(config: RunConfig) -> dict[str, Any] | None:
    """Return the field ``goodput`` of ``summary.json``; None if the run has done no step.

    The parts are those of all attempts at the run. Predicted parts are for the same productive
    time; they need ``hardware``. ``assumed`` has the typical figures in place of missing ones.

    Args:
        config: Configuration of the run.
    """
    try:
        run = read_run(Path(config.run_dir))
    except (NotARunError, OSError):
        return None
    measured = wall_time(run)
    if measured is None:
        return None
    saved_bytes = _bytes_of_checkpoint(config)
    content = {
        "share": measured.goodput,
        "measured_s": {
            "productive": measured.productive_s,
            "saving": measured.saving_s,
            "lost": measured.lost_s,
            "restarting": measured.restarting_s,
            "other": measured.other_s,
        },
        "failures": measured.failures,
        "rates": _measured_rates(config, run, measured, saved_bytes),
    }
    return content | _prediction(config, run, measured, saved_bytes)


def _bytes_of_checkpoint(config: RunConfig) -> int:
    """Return the bytes of the last checkpoint; 0 if there is none or it is in remote storage."""
    try:
        last = finished_runs.last_saved(config)
        return 0 if last is None else sum(file.bytes for file in step_folders.files(last).values())
    except (OSError, ValueError):
        return 0


def _measured_rates(
    config: RunConfig, run: RunRecord, measured: WallTime, saved_bytes: int
) -> dict[str, float]:
    """Return the figures of the hardware that this run has measured, by key.

    Reading a checkpoint is assumed to take as long as writing it.
    """
    rates: dict[str, float] = {}
    if saved_bytes and measured.written_s:
        rates["hardware.disk_gb_s"] = saved_bytes / measured.written_s / nodes(config)[1] / 1e9
    if measured.failures:
        rates["hardware.mtbf_gpu_hours"] = device_seconds(run) / 3600 / measured.failures
    if measured.restarts:
        restart_s = measured.restarting_s / measured.restarts
        rates["hardware.restart_s"] = max(0.0, restart_s - measured.written_s)
    return rates


def _prediction(
    config: RunConfig, run: RunRecord, measured: WallTime, saved_bytes: int
) -> dict[str, Any]:
    """Return the predicted parts of the wall time for the same productive time."""
    hardware = hardware_of_run(config)[0] or config.hardware
    if hardware is None or not measured.productive_s:
        nothing = dict.fromkeys(("predicted_share", "predicted_s", "predicted_failures"))
        return {"assumed": {}, **nothing}
    config = with_values(config, {"hardware": hardware})
    devices = num_ranks(config)
    costs = save_costs(config, saved_bytes=saved_bytes)
    productive = measured.productive_s
    every = config.checkpoint.every
    interval = productive / max(1, measured.saves)
    if isinstance(every, int) and every:
        done = max(1, run.steps[-1]["step"] - run.first_step)
        interval = min(productive, every * productive / done)
    mtbf_s = failure_rates(hardware, devices=devices).expected * 3600 / devices
    expected = overheads(costs, interval_s=interval, mtbf_s=mtbf_s)
    predicted = {
        "productive": productive,
        "saving": productive * expected.saving,
        "lost": productive * expected.lost,
        "restarting": productive * expected.restarting,
        "other": measured.other_s,
    }
    return {
        "assumed": assumed_rates(config),
        "predicted_share": productive / sum(predicted.values()),
        "predicted_s": predicted,
        "predicted_failures": productive * expected.failures,
    }
