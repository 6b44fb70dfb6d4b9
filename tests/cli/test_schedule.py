"""``axonlaunch schedule``: the pipeline's schedule as text, as JSON and as a plot."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from support.command import Served
from support.served import Server

from axonlaunch.cli.app import run_command
from axonlaunch.cli.shared import plotting
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.engines.pipeline.timeline import timeline
from axonlaunch.engines.pipeline.timeline_plot import draw_timeline
from axonlaunch.engines.pipeline.timeline_text import text_timeline

BATCH = "train.global_batch_size=32"
Schedule = Callable[..., tuple[int, str, str]]


@pytest.fixture
def schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Schedule:
    """Return the command in this process, which has imported torch: status, output and errors.

    A step has 32 samples by default.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def command(*overrides: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["axonlaunch", "schedule", BATCH, *overrides])
        with pytest.raises(SystemExit) as ended:
            run_command()
        output, errors = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, output, errors

    return command


def in_json(schedule: Schedule, *overrides: str) -> dict[str, Any]:
    status, output, errors = schedule(*overrides, "--json")
    assert (status, errors) == (0, "")
    content: dict[str, Any] = json.loads(output)
    return content


@pytest.mark.slow
def test_the_plot_of_1f1b_is_the_one_of_the_papers(tmp_path: Path) -> None:
    """In a separate process whose output is not a terminal: plain text."""
    script = (
        "import sys\n"
        "from axonlaunch.cli.app import run_command\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n    run_command()\nfinally:\n    assert 'matplotlib' not in sys.modules"
    )
    overrides = ["strategy=pipeline", "strategy.pipeline.degree=3", "train.global_batch_size=6"]
    ran = subprocess.run(
        [sys.executable, "-c", script, "schedule", *overrides, "train.micro_batch_size=1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "60"},
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        "1f1b: 3 ranks, 6 micro-batches",
        "",
        "        0         5         10        15        20",
        "rank 0  F0F1F2        B0- F3B1- F4B2- F5B3-   B4-   B5-",
        "rank 1    F0F1    B0- F2B1- F3B2- F4B3- F5B4-   B5-",
        "rank 2      F0B0- F1B1- F2B2- F3B3- F4B4- F5B5-",
        "",
        " F  forward   B  backward",
        "bubble       25.0% of all ranks' time",
        "activations  0:3 1:2 2:1 (stage:micro-batches held at most)",
    ]
    assert list(tmp_path.iterdir()) == []


def test_json_has_every_action_of_every_rank(schedule: Schedule) -> None:
    assert in_json(schedule, "strategy=pipeline", "train.micro_batch_size=16") == {
        "schedule": "1f1b",
        "degree": 2,
        "stages_per_rank": 1,
        "microbatches": 2,
        "rounds": 1,
        "bubble_fraction": pytest.approx(1 / 3),
        "span": 9.0,
        "live_activations": [2, 1],
        "activation_bytes": None,
        "ranks": [
            {"rank": 0, "stages": [0], "actions": ["0F0", "0F1", "0B0", "0B1"]},
            {"rank": 1, "stages": [1], "actions": ["1F0", "1B0", "1F1", "1B1"]},
        ],
        "plot": None,
    }


def test_a_step_may_be_several_rounds_and_ranks_may_have_other_work(schedule: Schedule) -> None:
    shown = in_json(
        schedule,
        "strategy=hybrid",
        "strategy.pipeline.schedule=zbv_zero_bubble",
        "strategy.pipeline.microbatches=4",
        "train.micro_batch_size=1",
        "launch.nproc=8",
    )
    assert (shown["degree"], shown["stages_per_rank"], shown["microbatches"]) == (2, 2, 4)
    assert shown["rounds"] == 4  # 32 samples, 2 data-parallel ranks, 4 of 1 sample a round
    assert [rank["stages"] for rank in shown["ranks"]] == [[0, 3], [1, 2]]
    assert len(shown["live_activations"]) == 4


def test_spans_can_be_compared_between_schedules(schedule: Schedule) -> None:
    """More stages per rank do the same work in smaller parts."""
    overrides = ["strategy=pipeline", "strategy.pipeline.degree=4", "train.micro_batch_size=4"]
    span = {
        name: in_json(schedule, *overrides, f"strategy.pipeline.schedule={name}")["span"]
        for name in SCHEDULES
    }
    assert span["gpipe"] == span["1f1b"] == 3 * (8 + 3)
    assert span["interleaved_1f1b"] == 3 * (8 + 3 / 2)
    assert span["zbv_zero_bubble"] < span["interleaved_1f1b"]


def test_without_a_pipeline_there_is_no_schedule(schedule: Schedule) -> None:
    assert schedule("strategy=fsdp") == (
        2,
        "",
        "error: strategy.pipeline.degree=1: has no schedule; use strategy=pipeline "
        "or a degree of 2 or more\n",
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--plot", "bubble.pdf"], "--plot=bubble.pdf: must end in .png or .svg"),
        (
            ["--plot", "nowhere/a.png"],
            "--plot=nowhere/a.png: there is no folder nowhere; create it",
        ),
        (["--plot", "."], "--plot=.: is a folder; write to a file in it"),
        (["launch.nproc=3"], "strategy.pipeline.degree=2: 3 ranks are not divisible by it"),
        (["train.micro_batch_size=32"], "train.micro_batch_size=32: schedule=1f1b on 2 ranks"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    overrides: list[str], message: str, schedule: Schedule, tmp_path: Path
) -> None:
    status, output, errors = schedule("strategy=pipeline", *overrides)
    assert (status, output) == (2, "")
    assert errors.startswith(f"error: {message}")
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_a_timeline_fits_the_terminal_or_says_how_much_is_cut(
    name: str, width: int, microbatches: int
) -> None:
    times = timeline(PipelineSchedule(name, degree=4, microbatches=microbatches))
    lines = text_timeline(times, width=width).plain.splitlines()
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= width
    drawn = [set(re.findall(r"[FBIW]\d+", row.upper())) for row in rows]
    reported = [line for line in lines if line.startswith("cut: ")]
    if not reported:
        for rank, cells in enumerate(drawn):
            row = [slot.action for slot in times.slots if slot.rank == rank]
            assert cells == {f"{action.kind}{action.microbatch}" for action in row}
        return
    shown, full, columns = re.findall(r"[\d.]+", reported[0])
    assert 0 < float(shown) < float(full) == pytest.approx(times.span, rel=1e-3)
    assert "cut" not in text_timeline(times, width=int(columns)).plain
    assert "cut" in text_timeline(times, width=int(columns) - 1).plain


def test_half_a_number_is_never_shown_where_the_terminal_ends() -> None:
    times = timeline(PipelineSchedule("gpipe", degree=2, microbatches=12))
    for width in range(24, 90):
        for line in text_timeline(times, width=width).plain.splitlines()[1:3]:
            cells = re.findall(r"F(\d+)", line)
            assert cells == [str(number) for number in range(len(cells))]


def test_color_is_for_terminals_and_nothing_hangs_on_it() -> None:
    times = timeline(PipelineSchedule("zbv_zero_bubble", degree=2, microbatches=4))

    def shown(**options: Any) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=140, highlight=False, **options)
        console.print(text_timeline(times, width=140))
        return stream.getvalue()

    plain = shown()
    colored = shown(force_terminal=True, color_system="truecolor")
    assert "\x1b" not in plain
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain
    assert "small letters are a rank's later stages" in plain
    assert all(letter in plain for letter in "FfIiWw")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["1f1b", "interleaved_zero_bubble", "dualpipev"])
def test_plots_have_titles_and_axis_labels(name: str, schedule: Schedule, tmp_path: Path) -> None:
    overrides = ["strategy=pipeline", f"strategy.pipeline.schedule={name}"]
    assert in_json(schedule, *overrides, "--plot", "a.png")["plot"] == "a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    status, output, _ = schedule(*overrides, "--plot", "b.svg")
    assert status == 0
    assert output.splitlines()[-1].split() == ["plot", "b.svg"]
    drawing = (tmp_path / "b.svg").read_text()
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    # matplotlib leaves the text of its paths as comments.
    written = re.findall(r"<!-- (.*?) -->", drawing)
    assert any(line.startswith(f"{name}: 2 ranks") and "bubble" in line for line in written)
    assert {"rank 0", "rank 1", "forward", "waits"} <= set(written)
    assert any("time" in line for line in written)


@pytest.mark.slow
def test_activations_are_reported_in_bytes_of_a_traced_step(tmp_path: Path, server: Server) -> None:
    axonlaunch = Served(tmp_path, server)
    overrides = ["schedule", "strategy=pipeline", BATCH, "train.micro_batch_size=4", "--memory"]
    reported = json.loads(axonlaunch(*overrides, "--json").stdout)
    assert reported["live_activations"] == [2, 1]
    first, last = reported["activation_bytes"]
    assert first > last > 2**20
    output = axonlaunch(*overrides).stdout
    assert re.fullmatch(r"in bytes     0:[\d.]+ MiB 1:[\d.]+ MiB", output.splitlines()[-1])


def test_drawing_changes_nothing_of_matplotlibs(tmp_path: Path) -> None:
    import matplotlib

    parameters = matplotlib.rcParams.copy()  # dict() would choose a backend, and import pyplot
    plotting.save(
        draw_timeline(timeline(PipelineSchedule("1f1b", degree=2, microbatches=2))),
        tmp_path / "a.png",
    )
    assert matplotlib.rcParams.copy() == parameters
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_one_is_reported_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; run pip install 'axonlaunch\[plot\]'"):
        plotting.check_plot(tmp_path / "a.png")


def test_a_plot_that_can_not_be_written_is_a_users_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    times = timeline(PipelineSchedule("1f1b", degree=2, microbatches=2))
    with pytest.raises(ConfigError, match="can't be written: No space left on device"):
        plotting.save(draw_timeline(times), tmp_path / "a.svg")
