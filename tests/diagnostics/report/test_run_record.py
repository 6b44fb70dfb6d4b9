"""Complete, partial, crashed or corrupt run folders can be read; missing parts are reported."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

import fsspec
import pytest
from support.run_folders import run_folder, write_lines

from axonlaunch.cli.shared.run_folders import read_runs
from axonlaunch.diagnostics.report.comparison import changed_settings, results
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import (
    NotARunError,
    find_runs,
    is_running,
    read_run,
)
from axonlaunch.diagnostics.report.record.run_timeline import (
    cost,
    device_seconds,
    nodes_of_run,
    spans,
    step_seconds,
)


def test_a_finished_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "demo", steps=20))
    assert (run.name, run.status, len(run.steps)) == ("demo", "done", 20)
    assert run.config["train.steps"] == 20
    assert [line["eval_loss"] for line in run.evaluations] == [1.5]
    assert run.notes == []


@pytest.fixture
def on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read runs on the node that launched them."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node-0")


@pytest.mark.usefixtures("on_its_node")
def test_a_run_that_said_nothing_of_its_end_was_killed(tmp_path: Path) -> None:
    assert read_run(run_folder(tmp_path / "demo", status=None)).status == "killed"


@pytest.mark.parametrize(("ago_s", "status"), [(60, "running"), (700, "unknown")])
def test_a_run_on_another_node_runs_while_it_writes_and_is_not_taken_to_be_killed(
    ago_s: float, status: str, tmp_path: Path
) -> None:
    limit = "launch:\n  timeout_s: 600.0\n"
    folder = run_folder(tmp_path / "demo", status=None, extra_config=limit)
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(folder / name, 2 * (time.time() - ago_s,))
    assert read_run(folder).status == status


def test_ended_run_of_another_node_has_recorded_status(tmp_path: Path) -> None:
    assert read_run(run_folder(tmp_path / "demo", status="failed")).status == "failed"


@pytest.mark.usefixtures("on_its_node")
def test_an_older_summary_says_nothing_of_an_attempt_that_was_killed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo")
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": 2000, "event": "started", "step": 30}) + "\n")
    run = read_run(folder)
    assert (run.status, run.summary) == ("killed", {})


def test_a_run_whose_folder_a_process_holds_is_running_and_is_not_disturbed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", status=None)
    lock = os.open(folder / "logs", os.O_RDONLY)
    assert not is_running(folder)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert is_running(folder)
    assert read_run(folder).status == "running"
    os.close(lock)
    assert not is_running(folder)


def test_half_a_line_at_the_end_is_being_written_and_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=5)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "lo')
    run = read_run(folder)
    assert (len(run.steps), run.notes) == (5, [])


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "summary.json", "config.yaml"])
def test_unreadable_file_is_named_and_others_are_read(name: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo")
    (folder / name).write_bytes(b"\xff\xfe[]{\n\n")
    [note, *_] = read_run(folder).notes
    assert name in note


def test_links_and_fifos_are_skipped(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo")
    (folder / "summary.json").unlink()
    (folder / "summary.json").symlink_to("/etc/passwd")
    (folder / "events.jsonl").unlink()
    os.mkfifo(folder / "events.jsonl")
    notes = " ".join(read_run(folder).notes)
    assert "summary.json can't be read: is not a regular file" in notes
    assert "events.jsonl can't be read: is not a regular file" in notes


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match=r"contains neither config\.yaml nor metrics\.jsonl"):
        read_run(tmp_path)


def test_a_step_that_was_done_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=10)
    lines = [{"step": step, "loss": 1.0, "step_s": 1.0} for step in (1, 2, 3, 2, 3, 4)]
    write_lines(folder / "metrics.jsonl", lines)
    run = read_run(folder)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4]
    assert step_seconds(run) == 4.0


def test_each_attempt_of_a_run_is_a_span_also_one_that_was_killed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo")
    start = {"event": "started", "step": 0, "world_size": 2, "layout": "ddp 2"}
    failed = {"event": "failed", "rank": 1, "reason": "killed by SIGKILL"}
    events = [
        {"time": 1, "event": "launched"},
        {"time": 2, **start},
        {"time": 5, **failed},
        {"time": 5.1, **failed},
        {"time": 6, **start, "step": 4},
        {"time": 8, "event": "launched"},
        {"time": 9, **start, "step": 4, "world_size": 1},
        {"time": 12, "event": "ended"},
    ]
    write_lines(folder / "events.jsonl", events)
    shown = spans(read_run(folder))
    attempts = [(span.start, span.end) for span in shown if span.kind == "attempt"]
    assert attempts == [(1, 5), (6, 6), (8, 12)]
    assert [span.text for span in shown if span.kind == "failure"] == ["rank 1: killed by SIGKILL"]


PRICE = "hardware:\n  price_per_hour: 3\n"


def test_a_run_costs_its_devices_hours_at_their_price(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", extra_config=PRICE)
    start = {"event": "started", "step": 0}
    events = [
        {"time": 0, "event": "launched"},
        {"time": 60, **start, "world_size": 4},
        {"time": 1800, "event": "failed", "rank": 1, "reason": "boom"},
        {"time": 3600, **start, "world_size": 2},
        {"time": 7200, "event": "ended"},
    ]
    write_lines(folder / "events.jsonl", events)
    run = read_run(folder)
    assert device_seconds(run) == 4 * 1800 + 2 * 3600
    assert cost(run) == pytest.approx(3 * 4)
    assert cost(read_run(run_folder(tmp_path / "free"))) is None


def test_the_devices_of_a_run_that_was_killed_were_held_while_it_did_its_steps(
    tmp_path: Path,
) -> None:
    folder = run_folder(tmp_path / "demo", steps=20, status=None)  # of 0.1 s
    started = {"time": 5, "event": "started", "step": 10, "world_size": 8}
    write_lines(folder / "events.jsonl", [{"time": 0, "event": "launched"}, started])
    assert device_seconds(read_run(folder)) == pytest.approx(8 * (5 + 1))


def test_nodes_that_join_and_leave_are_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo")
    names = [["a", "b"], ["a"], ["a", "c", "c"]]
    write_lines(
        folder / "events.jsonl",
        [{"time": n, "event": "nodes", "hosts": node} for n, node in enumerate(names)],
    )
    run = read_run(folder)
    changes = [(span.start, span.text) for span in spans(run) if span.kind == "node"]
    assert changes == [(1, "b left"), (2, "c joined"), (2, "c joined")]
    assert nodes_of_run(run) == ["a", "c", "c"]


def test_runs_are_found_at_any_depth_and_not_in_each_other(tmp_path: Path) -> None:
    run_folder(tmp_path / "a")
    run_folder(tmp_path / "sweep/0")
    run_folder(tmp_path / "sweep/0/inner")
    assert [run.name for run in find_runs(tmp_path)] == ["a", "0"]


def test_run_differences_are_listed_without_names(tmp_path: Path) -> None:
    runs = [
        read_run(run_folder(tmp_path / "a", steps=10)),
        read_run(run_folder(tmp_path / "b", steps=20, extra_config="seed: 3\n")),
    ]
    assert changed_settings(runs) == [("train.steps", ["10", "20"]), ("seed", ["(absent)", "3"])]
    assert ("steps", [10, 20]) in results(runs)


def test_a_run_in_a_bucket_is_read_as_one_in_a_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", ranks=2)
    bucket = fsspec.filesystem("memory")
    bucket.put(str(folder), "/bucket/demo", recursive=True)
    try:
        [run] = read_runs(["memory://bucket/demo"])
    finally:
        bucket.rm("/bucket", recursive=True)
    here = read_run(folder)
    assert (run.status, run.steps, run.events) == (here.status, here.steps, here.events)
    assert page_data([run])["runs"][0]["series"] == page_data([here])["runs"][0]["series"]
