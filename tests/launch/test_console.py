"""Lines of a run's console without a terminal."""

from __future__ import annotations

import io
import re
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from axonlaunch import config
from axonlaunch.events import Started, StepLogged
from axonlaunch.launch.output import summary
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.sweep import print_sweep_table
from axonlaunch.planning.background_estimate import BackgroundEstimate

README = Path(__file__).parents[2] / "README.md"

STEP: dict[str, Any] = {
    "step": 3,
    "loss": 1.5,
    "lr": 0.1,
    "grad_norm": None,
    "tokens": 64,
    "tokens_per_s": 1240.0,
    "step_s": 0.05,
    "peak_memory_bytes": 300 * 1024**2,
    "epoch": 0.1,
    "tokens_seen": 100,
}


@pytest.mark.parametrize(
    ("counted", "device", "line"),
    [
        ("tokens", "cpu", "step 3  loss 1.5000  1.24k tok/s  300 MiB RSS"),
        ("images", "cpu", "step 3  loss 1.5000  1.24k images/s  300 MiB RSS"),
        ("tokens", "cuda:0", "step 3  loss 1.5000  1.24k tok/s  300 MiB"),
    ],
)
def test_console_step_names_unit_and_memory(
    counted: Literal["tokens", "images"], device: str, line: str
) -> None:
    stream = io.StringIO()
    show = RunConsole(stream=stream)
    show(
        Started(
            run_dir="runs/run",
            layout="single",
            device=device,
            parameters=1,
            samples=1,
            counted=counted,
            step=0,
            steps=9,
            resumed_from=None,
            corrupt=(),
            notes=(),
        )
    )
    show(StepLogged(**STEP))
    assert stream.getvalue().splitlines()[-1] == line


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, ""),
        (80, "  123k tok/s  41.2% MFU  60 GiB"),
        (140, "  123k tok/s  41.2% MFU  60 GiB of 70 GiB reserved"),
    ],
)
def test_progress_bar_has_the_figures_that_fit_the_width(width: int, shown: str) -> None:
    stream = io.StringIO()
    show = RunConsole(stream=stream)
    show._console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    about: dict[str, Any] = {"layout": "fsdp 8", "device": "cuda:0", "counted": "tokens"}
    about |= {"parameters": 1, "samples": 1, "corrupt": (), "notes": (), "resumed_from": None}
    show(Started(run_dir="runs/run", step=0, steps=100_000, **about))
    peak = {"peak_memory_bytes": 60 * 1024**3, "reserved_bytes": 70 * 1024**3}
    show(StepLogged(**{**STEP, "step": 30_000, **peak, "tokens_per_s": 123e3, "mfu": 0.412}))
    show.stop()
    bar = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", stream.getvalue()).splitlines()[-1]
    assert f"loss 1.500{shown} " in bar
    assert "30000/100000" in bar
    assert len(bar) <= width


@pytest.mark.parametrize(("steps", "shown"), [(4, True), (400, False)])
def test_terminal_keeps_a_line_of_each_step_of_a_short_run(steps: int, shown: bool) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    show = RunConsole(stream=stream)
    about = {"run_dir": "runs/run", "layout": "single", "device": "cpu", "parameters": 1}
    more = {"samples": 1, "counted": "tokens", "resumed_from": None, "corrupt": (), "notes": ()}
    show(Started(**about, **more, step=0, steps=steps))  # type: ignore[arg-type]
    show(StepLogged(**STEP))
    show.stop()
    assert ("step 3  loss 1.5000  1.24k tok/s" in stream.getvalue()) is shown


def test_final_console_lines_equal_readme() -> None:
    chosen = config.with_values(config.load([]), {"run_dir": "runs/gpt-fsdp"})
    reported = {
        "status": "done",
        "steps": 450,
        "loss": 1.5903,
        "eval_loss": 1.9286,
        "tokens_per_s": 8500.0,
        "first_step_s": 3.3,
        "metrics": {},
        "measured_peak_bytes": int(42.6 * 1024**2),
        "goodput": None,
    }
    stream = io.StringIO()
    RunConsole(stream=stream).summary(summary._rows(chosen, reported, counted="tokens"))
    assert stream.getvalue() in README.read_text()


@pytest.mark.parametrize(
    ("background", "is_written", "lines"),
    [("true", True, 1), ("false", True, 0), ("true", False, 0)],
)
def test_console_names_reason_of_missing_estimate(
    background: str,
    is_written: bool,
    lines: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ["launch.nproc=1", f"run_dir={tmp_path}", "name=run"]
    chosen = config.load([*overrides, f"estimate.background={background}"])
    if is_written:
        (tmp_path / "logs").mkdir()
    prediction = BackgroundEstimate(get_context("forkserver"), chosen)
    prediction.memory.set_result(None, "it was not ready when the run had ended")
    prediction.step.set_result(None, "no step was done")
    stream = io.StringIO()
    console = RunConsole(stream=stream)
    summary._estimate_fields(chosen, prediction, console, waits=is_written)
    reason = "summary.json has no predicted_peak_bytes: it was not ready when the run had ended"
    assert " ".join(stream.getvalue().split()).count(reason) == lines
    assert capsys.readouterr().err == ""


def test_goodput_is_in_the_summary_of_runs_with_failures_only() -> None:
    goodput = {"share": 0.671, "predicted_share": 0.666, "failures": 9, "assumed": {}}
    [(_, text)] = summary._rows_of_goodput(goodput)
    assert text == "67.1% with 9 failures, 66.6% predicted"
    typical = {"assumed": {"hardware.restart_s": 600.0, "hardware.mtbf_gpu_hours": None}}
    [(_, text)] = summary._rows_of_goodput(goodput | typical)
    assert text.endswith("66.6% predicted with typical hardware.restart_s, hardware.mtbf_gpu_hours")
    assert summary._rows_of_goodput({**goodput, "failures": 0}) == []


@pytest.mark.parametrize(
    ("units", "heading", "cell"),
    [
        (("images", "images"), "images/s", "1.2k"),
        (("images", "tokens"), "images or tokens/s", "1.2k images"),
    ],
)
def test_sweep_table_names_unit(
    units: tuple[str, ...], heading: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    ended = [{"status": "done", "run_dir": "r", "loss": 1.0, f"{u}_per_s": 1200.0} for u in units]
    stream = io.StringIO()
    print_sweep_table(["a", "b"], ended, stream=stream)
    assert heading in stream.getvalue()
    assert cell in stream.getvalue()
