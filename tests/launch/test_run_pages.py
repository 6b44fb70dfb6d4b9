"""``runs``, ``report``, ``compare`` and ``watch`` on real runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, ConsoleDimensions
from support.command import Command, Served
from support.run_folders import run_folder
from support.served import Server

from axonlaunch.cli.reports.runs import BreakableName, table_of
from axonlaunch.cli.shared.run_folders import has_runs
from axonlaunch.cli.shared.run_screen import screen_of
from axonlaunch.cli.training.watch import await_run, command as watch_command
from axonlaunch.config import ConfigError
from axonlaunch.diagnostics.report.page_data import facts, page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.system.text.formatting import size

MOCK = ["launch.nproc=2", "launch.backend=mock"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    command = Served(tmp_path_factory.mktemp("trained"), server)
    overrides = ["name=demo", "train.steps=4", "checkpoint.every=2", "estimate.background=true"]
    command.train("strategy=fsdp", *MOCK, *overrides)
    return command.folder / "runs"


@pytest.fixture
def run(trained: Path, served: Command) -> Path:
    """Return a copy of the trained run in the test's folder."""
    shutil.copytree(trained, served.folder / "runs")
    return served.folder / "runs/demo"


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_run_events_are_in_order(run: Path) -> None:
    written = [event for event in events(run) if event["event"] != "system"]  # of a slow run
    assert [event["event"] for event in written] == [
        "launched",
        "started",
        "saved",
        "evaluated",
        "saved",
        "ended",
    ]
    assert [event["time"] for event in written] == sorted(event["time"] for event in written)  # type: ignore[type-var]
    started = written[1]
    assert (started["world_size"], started["layout"]) == (2, "fsdp 2")
    assert written[-1]["status"] == "done"


def test_run_page_shows_profiled_steps(served: Command) -> None:
    overrides = ["train.steps=3", "train.profile.steps=[2,3]", "estimate.background=true"]
    served.train("strategy=ddp", *MOCK, "name=demo", *overrides)
    steps = page_data([read_run(served.folder / "runs/demo")])["runs"][0]["steps"]
    [rank] = steps["bars"]
    assert rank["name"] == "rank 0, profiled"
    assert steps["reason"].startswith("ranks of launch.backend=mock take turns")
    assert sum(rank["parts"].values()) == pytest.approx(rank["step_s"], rel=1e-3)


def test_run_records_origin_of_each_config_value(run: Path) -> None:
    origins = json.loads((run / "origins.json").read_text())
    assert origins["train.steps"] == "override train.steps=4"
    assert origins["strategy.data_parallel"] == "strategy/fsdp.yaml"
    assert origins["launch.threads"] == "automatic: default has auto"
    config = page_data([read_run(run)])["runs"][0]["config"]
    assert ["train.steps", "4", "override train.steps=4"] in config
    assert all(origin for _, _, origin in config)


def test_run_records_estimate_breakdown(run: Path) -> None:
    estimate = json.loads((run / "estimate.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    assert estimate["peak_bytes"] == summary["predicted_peak_bytes"]
    [rank] = estimate["ranks"]
    assert sum(rank["breakdown"].values()) == rank["peak_bytes"]


def test_a_resumed_run_continues_its_events(run: Path, served: Command) -> None:
    served.train("strategy=ddp", *MOCK, "name=demo", "train.steps=6", "checkpoint.every=2")
    started = [event for event in events(run) if event["event"] == "started"]
    assert [event["step"] for event in started] == [0, 4]


def test_a_rank_that_fails_is_in_the_events(served: Command) -> None:
    served.train("strategy=ddp", *MOCK, "name=demo", "optimizer.lr=1e30", status=1)
    [failed] = [e for e in events(served.folder / "runs/demo") if e["event"] == "failed"]
    assert "loss" in str(failed["reason"])


def test_runs_command_lists_status_and_filters(run: Path, served: Command) -> None:
    [row] = json.loads(served("runs", "--json").stdout)["runs"]
    assert (row["status"], row["layout"], row["step"], row["steps"]) == ("done", "fsdp 2", 4, 4)
    assert "demo" in served("runs", "--where", "strategy.data_parallel=fsdp").stdout
    assert served("runs", "--where", "status=failed").stdout == "runs: no run matches --where\n"


@pytest.mark.parametrize("width", [40, 64, 80])
def test_table_of_runs_shows_names_in_a_narrow_terminal(width: int) -> None:
    row = {"run": "runs/gpt-fsdp", "status": "interrupted", "layout": "fsdp 2 x tensor 2"}
    row |= {"step": 12345, "steps": 20000, "loss": 2.5, "counted": "tokens", "tokens_per_s": 14e3}
    stream = StringIO()
    console = Console(file=stream, width=width)
    console.print(table_of([{**row, "changed_at": time.time()}], Path("runs"), width=width))
    assert "gpt-" in stream.getvalue()
    assert "12345/20000" in stream.getvalue()


@pytest.mark.parametrize(
    ("condition", "number"),
    [
        ("train.steps=1", 1),
        ("train.steps=1e0", 1),
        ("train.steps=true", 0),
        ("optimizer.lr=3e-3", 1),
        ("optimizer.lr=fast", 0),
        ("model.is_causal=true", 1),
        ("plugins=[]", 1),
        ("seed=null", 1),
    ],
)
def test_runs_condition_compares_written_value(
    condition: str, number: int, served: Command
) -> None:
    extra = "model.is_causal: true\nplugins: []\nseed: null\noptimizer.lr: 0.003\n"
    run_folder(served.folder / "runs/demo", steps=1, extra_config=extra)
    listed = json.loads(served("runs", "--where", condition, "--json").stdout)["runs"]
    assert len(listed) == number


def test_report_writes_the_page_into_the_runs_folder(run: Path, served: Command) -> None:
    assert served("report", "runs/demo").stdout == "runs/demo/report.html\n"
    assert "fsdp 2" in (run / "report.html").read_text()


def test_report_of_several_runs_does_not_change_their_pages(served: Command) -> None:
    for name in "ab":
        run_folder(served.folder / "runs" / name)
    served("report", "runs/a")
    page = (served.folder / "runs/a/report.html").read_bytes()
    assert served("report", "runs/a", "runs/b").stdout == "runs/report-a-b.html\n"
    assert (served.folder / "runs/a/report.html").read_bytes() == page
    assert (served.folder / "runs/report-a-b.html").read_bytes() != page


def test_folder_of_runs_is_reported_and_compared_as_all_of_them(served: Command) -> None:
    for number in range(3):
        run_folder(served.folder / f"runs/sweep/{number}", steps=number + 1)
    assert served("report", "runs/sweep").stdout == "runs/sweep/report.html\n"
    page = (served.folder / "runs/sweep/report.html").read_text()
    assert all(f'"label":"{number}"' in page for number in range(3))
    compared = json.loads(served("compare", "runs/sweep", "--json").stdout)
    assert compared["results"]["steps"] == [1, 2, 3]
    assert "two or more" in served("compare", "runs/sweep/0", status=2).stderr


def test_runs_lists_images_per_second(served: Command) -> None:
    run_folder(served.folder / "runs/a", counted="images")
    run_folder(served.folder / "runs/b")
    [a, b] = sorted(json.loads(served("runs", "--json").stdout)["runs"], key=lambda r: r["run"])
    assert (a["images_per_s"], b["tokens_per_s"]) == (1000.0, 1000.0)
    assert "tokens_per_s" not in a
    shown = served("runs").stdout
    assert "1k images/s" in shown
    assert "1k tokens/s" in shown


def test_report_of_several_runs_is_written_to_output_option(served: Command) -> None:
    for name in "ab":
        run_folder(served.folder / "runs" / name)
    report = json.loads(served("report", "runs/a", "runs/b", "--output", "c.html", "--json").stdout)
    assert report["page"] == "c.html"
    assert (served.folder / "c.html").stat().st_size == report["bytes"]


def test_compare_lists_differences(served: Command) -> None:
    for name, steps in (("a", 3), ("b", 5)):
        run_folder(served.folder / "runs" / name, steps=steps)
    differences = json.loads(served("compare", "runs/a", "runs/b", "--json").stdout)
    assert differences["configuration"] == {"train.steps": ["3", "5"]}
    assert differences["results"]["steps"] == [3, 5]
    shown = served("compare", "runs/a", "runs/b").stdout
    assert "train.steps" in shown
    peak, _ = differences["results"]["peak memory of tensors (bytes)"]
    assert re.search(rf"peak memory of tensors  +{size(peak)}  +{size(peak)}", shown)


@pytest.mark.parametrize("command", ["report", "watch", "compare"])
def test_folder_without_run_is_refused_in_one_line(command: str, served: Command) -> None:
    (served.folder / "empty").mkdir()
    run_folder(served.folder / "runs/demo")
    overrides = ["empty", *(["demo"] if command == "compare" else [])]
    errors = served(command, *overrides, status=2).stderr.splitlines()
    assert errors[0] == "error: empty: contains neither config.yaml nor metrics.jsonl of a run"
    if command == "compare":
        assert errors[1].endswith("; did you mean runs/demo?")


def test_name_of_a_run_breaks_between_its_words() -> None:
    name = BreakableName("qwen3-0.6b-lora_chat/learning-rate")
    assert name.lines(80) == [name.text]
    assert name.lines(16) == ["qwen3-0.6b-lora_", "chat/learning-", "rate"]
    assert name.lines(6) == ["qwen3-", "0.6b-", "lora_", "chat/", "learni", "ng-", "rate"]


def test_watch_of_a_folder_shows_the_table_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        run_folder(tmp_path / "runs" / name)
    assert has_runs(tmp_path / "runs")
    assert not has_runs(tmp_path / "runs/one")

    def interrupt(seconds: float) -> None:
        assert seconds >= 1
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    with pytest.raises(ConfigError, match=f"needs a terminal; use axonlaunch runs {tmp_path}/runs"):
        watch_command(tmp_path / "runs")
    with pytest.raises(ConfigError, match="needs a terminal; use axonlaunch watch without --tui"):
        watch_command(tmp_path / "runs/one", tui=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(KeyboardInterrupt):
        watch_command(tmp_path / "runs")
    shown = capsys.readouterr().out
    assert re.search(r"^two +done", shown, flags=re.MULTILINE)
    assert re.search(r"^one +done", shown, flags=re.MULTILINE)


@pytest.mark.parametrize("started", ["later", "later/0"])
def test_watch_waits_for_a_run_or_a_sweep_that_starts_later(
    started: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    start = threading.Timer(0.3, run_folder, (tmp_path / "runs" / started,))
    start.start()
    assert await_run(Path("later")) == Path("runs/later")
    start.join()
    assert capsys.readouterr().err == "waiting for a run in later to start (Ctrl-C to stop)\n"
    assert await_run(Path("later")) == Path("runs/later")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runs", "nowhere"], "nowhere: there is no such folder"),
        (["runs", __file__], f"{__file__}: is a file, not a folder"),
        (
            ["runs", ".", "--where", "loss"],
            "--where=loss: write KEY=VALUE, for example status=failed",
        ),
        (["watch"], "runs: contains no run; give the folder of a run"),
        (["compare", "a"], "a: there is no such folder"),
    ],
)
def test_user_errors_are_one_line(overrides: list[str], message: str, served: Command) -> None:
    assert message in served(*overrides, status=2).stderr


def test_compare_needs_two_runs(served: Command) -> None:
    run_folder(served.folder / "runs/one")
    refused = served("compare", "runs/one", "--json", status=2)
    assert "RUN: give two or more runs" in refused.stderr
    assert json.loads(refused.stdout)["errors"][0]["key"] == "RUN"


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("lr=3e-3", "lr=3e-3: no run in runs has this key; did you mean optimizer.lr?"),
        ("train.step=1", "no run in runs has this key; did you mean train.steps?"),
        ("status=finished", "there is no status 'finished'; known: running, done, "),
    ],
)
def test_a_condition_that_no_run_can_meet_is_refused(
    condition: str, message: str, served: Command
) -> None:
    run_folder(served.folder / "runs/demo", extra_config="optimizer.lr: 0.003\n")
    assert message in served("runs", "--where", condition, status=2).stderr


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("pages", "is a folder; write to a file in it"),
        ("nowhere/a.html", "there is no folder nowhere; create it, or write elsewhere"),
        ("file/a.html", "file is a file; write elsewhere"),
        ("/proc/a.html", "can't be written"),
    ],
)
def test_unwritable_report_is_refused(output: str, message: str, served: Command) -> None:
    run_folder(served.folder / "runs/demo")
    (served.folder / "pages").mkdir()
    (served.folder / "file").touch()
    refused = served("report", "runs/demo", "--output", output, status=2).stderr
    assert refused.startswith(f"error: --output={output}: ")
    assert message in refused


@pytest.mark.parametrize("width", [80, 140])
def test_the_screen_of_a_run_fits_its_terminal(width: int, tmp_path: Path) -> None:
    data = page_data([read_run(run_folder(tmp_path / "demo", steps=300, ranks=8))])
    stream = StringIO()
    size = ConsoleDimensions(width, 30)
    console = Console(file=stream, width=width, height=30)
    console.print(screen_of(data["runs"][0], size))
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= width
    assert "█" in stream.getvalue()
    assert "rank 7" in stream.getvalue()


def test_the_report_of_a_run_replaces_a_link_and_does_not_write_through_it(
    served: Command,
) -> None:
    folder = run_folder(served.folder / "runs/demo")
    other = served.folder / "other"
    other.write_text("kept")
    os.symlink(other, folder / "report.html")  # noqa: PTH211
    served("report", "runs/demo")
    assert other.read_text() == "kept"


def test_runs_command_lists_cost(run: Path, served: Command) -> None:
    priced = ["hardware=cpu", "hardware.price_per_hour=3600"]
    served.train("strategy=ddp", *MOCK, "name=priced", "train.steps=1", *priced)
    rows = {row["run"]: row for row in json.loads(served("runs", "--json").stdout)["runs"]}
    cost = rows["runs/priced"]["cost"]
    assert 0 < cost < 3600
    assert rows["runs/demo"]["cost"] is None
    compared = json.loads(served("compare", "runs/demo", "runs/priced", "--json").stdout)
    assert compared["results"]["cost"] == [None, cost]
    assert dict(facts(read_run(served.folder / "runs/priced")))["cost"].endswith(" at 3600)")
