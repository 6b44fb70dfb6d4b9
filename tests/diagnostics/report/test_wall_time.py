"""The wall time of a run is divided into productive steps, saves, lost steps and restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import run_folder, write_lines

from axonlaunch.diagnostics.report.page_data import facts, page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.diagnostics.report.record.wall_time import wall_time

START: dict[str, Any] = {"event": "started", "world_size": 2, "layout": "ddp 2"}
FAILED: dict[str, Any] = {"event": "failed", "rank": 1, "reason": "killed by SIGKILL"}


def saved(time: float, step: int, seconds: float = 1.0, stalled_s: float = 1.0) -> dict[str, Any]:
    return {
        "time": time,
        "event": "saved",
        "step": step,
        "seconds": seconds,
        "stalled_s": stalled_s,
    }


def folder_with(folder: Path, events: list[dict[str, Any]], *, steps: int, step_s: float) -> Path:
    written = run_folder(folder, steps=steps)
    lines = [{"step": step, "loss": 1.0, "step_s": step_s} for step in range(1, steps + 1)]
    write_lines(written / "metrics.jsonl", lines)
    write_lines(written / "events.jsonl", events)
    return written


def test_goodput_is_the_share_of_wall_time_in_steps_that_counted(tmp_path: Path) -> None:
    parts = wall_time(read_run(run_folder(tmp_path / "demo", steps=30)))
    assert parts is not None
    # 30 steps of 0.1 s; launched at 1000, ended at 1001 + 3 + 1.
    assert parts.goodput == pytest.approx(3.0 / 5.0)
    assert parts.saving_s == 0.25
    assert parts.other_s == pytest.approx(1.75)
    assert (parts.lost_s, parts.restarting_s, parts.failures) == (0.0, 0.0, 0)


def test_steps_after_the_resumed_checkpoint_are_lost(tmp_path: Path) -> None:
    events = [
        {"time": 0, "event": "launched"},
        {"time": 3, **START, "step": 0},
        saved(14, 10),
        {"time": 18, **FAILED},
        {"time": 23, **START, "step": 10},
        saved(34, 20),
        {"time": 36, "event": "ended", "status": "done"},
    ]
    run = read_run(folder_with(tmp_path / "demo", events, steps=20, step_s=1.0))
    parts = wall_time(run)
    assert parts is not None
    assert (parts.productive_s, parts.saving_s, parts.lost_s) == (20.0, 2.0, 4.0)
    assert (parts.restarting_s, parts.failures, parts.restarts) == (5.0, 1, 1)
    assert parts.other_s == 3.0 + 2.0  # the first start, and the end
    assert parts.total_s == 36.0
    assert (parts.written_s, parts.saves) == (1.0, 2)


def test_steps_of_the_run_that_another_one_continues_do_not_count(tmp_path: Path) -> None:
    events = [
        {"time": 0, **START, "step": 1000},
        {"time": 30, **FAILED, "step": 1010},
        {"time": 30, **START, "step": 1000},
        {"time": 60, "event": "ended", "status": "done"},
    ]
    folder = folder_with(tmp_path / "demo", events, steps=0, step_s=1.0)
    # Every tenth step is logged.
    lines = [{"step": step, "loss": 1.0, "step_s": 1.0} for step in (1010, 1020)]
    write_lines(folder / "metrics.jsonl", lines)
    run = read_run(folder)
    parts = wall_time(run)
    assert parts is not None
    assert dict(facts(run))["in steps"] == "0:00:20"
    assert page_data([run])["runs"][0]["progress"][2] == [0.0, 10.0, 20.0]
    assert parts.productive_s == 20.0
    assert parts.lost_s == 10.5  # ten steps and half of the one that failed


def test_steps_during_a_background_save_are_lost_with_it(tmp_path: Path) -> None:
    events = [
        {"time": 0, **START, "step": 0},
        saved(15, 10, seconds=5.0, stalled_s=1.0),
        saved(26, 20, seconds=5.0, stalled_s=1.0),
        {"time": 30, **FAILED},
        {"time": 31, **START, "step": 10},
        {"time": 42, "event": "ended", "status": "done"},
    ]
    parts = wall_time(read_run(folder_with(tmp_path / "demo", events, steps=20, step_s=1.0)))
    assert parts is not None
    assert parts.lost_s == 30 - (15 - 5 + 1)
    assert parts.saving_s == 1.0  # the other one is lost


def test_a_pause_after_an_interruption_is_no_part_of_wall_time(tmp_path: Path) -> None:
    events = [
        {"time": 0, "event": "launched"},
        {"time": 1, **START, "step": 0},
        saved(12, 10),
        {"time": 12, "event": "ended", "status": "interrupted"},
        {"time": 1000, "event": "launched"},
        {"time": 1002, **START, "step": 10},
        {"time": 1012, "event": "ended", "status": "done"},
    ]
    parts = wall_time(read_run(folder_with(tmp_path / "demo", events, steps=20, step_s=1.0)))
    assert parts is not None
    assert parts.total_s == 24.0
    assert (parts.restarting_s, parts.failures, parts.lost_s) == (0.0, 0, 0.0)


def test_attempts_that_never_became_ready_count_as_restarting(tmp_path: Path) -> None:
    events = [
        {"time": 0, **START, "step": 0},
        saved(6, 5),
        {"time": 8, **FAILED},
        {"time": 10, "event": "launched"},
        {"time": 12, **FAILED},
        {"time": 13, "event": "launched"},
        {"time": 15, **START, "step": 5},
        {"time": 20, "event": "ended", "status": "done"},
    ]
    parts = wall_time(read_run(folder_with(tmp_path / "demo", events, steps=10, step_s=1.0)))
    assert parts is not None
    assert (parts.lost_s, parts.restarting_s) == (2.0, 7.0)
    assert (parts.failures, parts.restarts) == (2, 1)


def test_report_shows_parts_of_wall_time_and_error_of_prediction(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=30)
    parts = {"saving": 0.25, "lost": 0.0, "restarting": 0.0}
    goodput = {"share": 0.6, "predicted_share": 0.64, "measured_s": parts, "predicted_s": parts}
    (folder / "summary.json").write_text(json.dumps({"status": "done", "goodput": goodput}))
    shown = dict(facts(read_run(folder)))
    assert shown["goodput"].startswith(
        "60.0% of wall time was spent in training steps (5.0% saving"
    )
    assert shown["predicted goodput"].startswith(
        "64.0%, +4.0 points: saving 0.25 s instead of 0.25"
    )


def test_time_until_a_failure_is_noticed_counts_as_restarting(tmp_path: Path) -> None:
    events = [
        {"time": 0, **START, "step": 0},
        saved(11, 10),
        {"time": 18, **FAILED, "step": 13},
        {"time": 19, **START, "step": 10},
        {"time": 29, "event": "ended", "status": "done"},
    ]
    parts = wall_time(read_run(folder_with(tmp_path / "demo", events, steps=20, step_s=1.0)))
    assert parts is not None
    assert parts.lost_s == 3.5  # and a half of the step in which it failed, on average
    assert parts.restarting_s == 18 - 11 - 3.5 + 1
    assert parts.total_s == 29.0
