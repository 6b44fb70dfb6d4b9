"""Every command that reads run folders accepts damaged ones: any value of any file replaced."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console, ConsoleDimensions
from support.run_folders import run_folder, write_lines

from axonlaunch.cli.reports import compare, runs
from axonlaunch.cli.shared.run_screen import screen_of
from axonlaunch.cli.training import watch
from axonlaunch.config import ConfigError
from axonlaunch.diagnostics.report.comparison import results, with_units
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import find_runs

JSON_VALUES = (
    "NaN",
    "1e999",
    "1e308",
    "1" + "0" * 400,
    "-1",
    "null",
    '"text"',
    "[[]]",
    '{"a": {}}',
)
"""Values that replace each value of a file."""
LINES = ("metrics.jsonl", "events.jsonl")
FILES = ("crash.json", "summary.json", "estimate.json", "step_time.json", "origins.json", *LINES)
_MARK = "replaced here"


def whole_folder(folder: Path) -> Path:
    """Write a run that has every file."""
    run_folder(folder, steps=3, ranks=2, extra_config="hardware:\n  price_per_hour: 2.5\n")
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": 1, "loss": 2.0, "step_s": 0.1, "tokens": 9, "tokens_per_s": 9.0, "mfu": 0.4},
            {"step": 2, "loss": 1.0, "step_s": 0.1, "samples": 9, "samples_per_s": 9.0},
            {"step": 2, "eval_loss": 1.5},
        ],
    )
    shares = {"data": [0.1, 0.1], "compute": [0.5, 0.9], "wait": [0.1] * 2, "starved": [0.0] * 2}
    write_lines(
        folder / "events.jsonl",
        [
            {"time": 1.0, "event": "launched", "host": "a", "by": "b", "commit": "c"},
            {"time": 2.0, "event": "nodes", "hosts": ["a"]},
            {"time": 3.0, "event": "started", "step": 0, "world_size": 2, "layout": "ddp 2"}
            | {"parameters": 10, "counted": "tokens", "versions": {"torch": "2.13"}},
            {"time": 4.0, "event": "rank_times", "step": 2, "hosts": ["a", "a"], **shares},
            {"time": 4.5, "event": "system", "host": "a", "cpu": 0.5, "memory_bytes": 9}
            | {"memory_total_bytes": 99, "gpu_use": [0.5, 0.5], "sent_bytes_per_s": 9},
            {"time": 5.0, "event": "saved", "step": 2, "seconds": 0.1, "stalled_s": 0.1},
            {"time": 5.0, "event": "evaluated", "step": 2, "eval_loss": 1.5},
            {"time": 5.5, "event": "sample_generated", "prompt": "a", "text": "b"},
            {"time": 5.6, "event": "noted", "text": "b"},
            {"time": 6.0, "event": "failed", "rank": 1, "reason": "boom"},
            {"time": 7.0, "event": "ended", "status": "failed", "step": 2},
        ],
    )
    contents: dict[str, Any] = {
        "crash.json": {"rank": 1, "world_size": 2, "host": "a", "kind": "error", "reason": "boom"}
        | {"doing": "stepping", "step": 2, "traceback": "T", "hint": "h", "coords": {"dp": 1}}
        | {"followers": [{"rank": 0, "reason": "lost"}]},
        "summary.json": {"status": "failed", "steps": 2, "tokens_per_s": 9.0, "first_step_s": 1.0}
        | {"measured_peak_bytes": 9, "predicted_peak_bytes": 9, "predicted_step_s": 0.1}
        | {"proof": {"passed": True}},
        "estimate.json": {"mesh": {"dp": 2}, "peak_bytes": 9}
        | {"ranks": [{"rank": 0, "coords": {"dp": 1}, "peak_bytes": 9, "breakdown": {"p": 9}}]},
        "step_time.json": {"parts": {"a": 0.1}, "step_s": 0.1, "hardware": "cpu", "reason": ""}
        | {"pipeline": [[0, 0.0, 1.0, "F0"]]},
        "origins.json": {"train.steps": "override"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def replaced(content: Any) -> Iterator[Any]:
    """Yield copies of nested values, each with one value marked, and the whole marked."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, below in items:
                yield from places(below, (*path, key))

    for path in places(content, ()):
        if not path:
            yield _MARK
            continue
        changed = copy.deepcopy(content)
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = _MARK
        yield changed


def use_everything(folder: Path) -> None:
    """Use a run as each command does."""
    [run] = find_runs(folder.parent)
    data = page_data([run, run])
    json.dumps(data, allow_nan=False)
    console = Console(file=StringIO(), width=80)
    console.print(screen_of(data["runs"][0], ConsoleDimensions(80, 30)))
    rows = results([run, run])
    json.dumps([rows, runs.row_of(run)], allow_nan=False)
    for _, values in with_units(rows):
        [compare._short(value) for value in values]
    runs._show([runs.row_of(run)], folder.parent)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("crash.json", '"step": 2', '"step": NaN'),
        ("events.jsonl", "0.9]", "NaN]"),
        ("events.jsonl", "0.9]", "1e300]"),
        ("events.jsonl", '"time": 2.0', '"time": 1e18'),
        ("events.jsonl", '"time": 2.0', '"time": -1e18'),
        ("metrics.jsonl", '"loss": 2.0', '"loss": 1' + "0" * 400),
        ("metrics.jsonl", '"step_s": 0.1', '"step_s": 1e308'),
        ("metrics.jsonl", '"step": 1,', '"step": 1e300,'),
        ("summary.json", '"measured_peak_bytes": 9', '"measured_peak_bytes": "much"'),
        ("config.yaml", "price_per_hour: 2.5", "price_per_hour: .inf"),
    ],
)
def test_numbers_that_no_run_writes_are_left_out(
    name: str, old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole_folder(tmp_path / "runs/demo")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    use_everything(folder)
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_any_value_of_a_runs_file_may_be_damaged(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole_folder(tmp_path / "runs/demo")
    use_everything(folder)
    file = folder / name
    texts = file.read_text().splitlines() if name in LINES else [file.read_text()]
    failures = []
    for number, text in enumerate(texts):
        for content in replaced(json.loads(text)):
            marked = json.dumps(content)
            for value in JSON_VALUES:
                damaged = [*texts]
                damaged[number] = marked.replace(f'"{_MARK}"', value)
                file.write_text("\n".join(damaged) + "\n")
                try:
                    use_everything(folder)
                except Exception as error:
                    failures.append(f"{type(error).__name__}: {error}: {damaged[number]}")
                capsys.readouterr()
    assert not failures, f"{len(failures)}:\n" + "\n".join(failures[:10])


@pytest.mark.slow
@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e999", "1" + "0" * 400, "[1]", "{}"])
def test_any_value_of_a_configuration_may_be_damaged(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole_folder(tmp_path / "runs/demo")
    file = folder / "config.yaml"
    for content in replaced(yaml.safe_load(file.read_text())):
        file.write_text(yaml.safe_dump(content).replace(_MARK, value))
        use_everything(folder)
        capsys.readouterr()


def damage_empty(file: Path) -> None:
    file.write_text("")


def damage_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def damage_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/etc/passwd")


@pytest.mark.parametrize("damage", [damage_empty, damage_fifo, damage_link])
def test_an_unreadable_run_is_a_row_that_says_so_and_hides_no_other(
    damage: Callable[[Path], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(Path("runs/good"), steps=2)
    for name in ("bad", "config_alone"):
        run_folder(tmp_path / "runs" / name, steps=2)
        damage(tmp_path / "runs" / name / "config.yaml")
    (tmp_path / "runs/bad/metrics.jsonl").unlink()
    runs.command(Path("runs"), filters=None, as_json=True)
    rows = {Path(row["run"]).name: row for row in json.loads(capsys.readouterr().out)["runs"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "done",
        "bad": "unreadable",
        "config_alone": "done",
    }
    for name in ("bad", "config_alone"):
        assert rows[name]["notes"][0].startswith("config.yaml can't be read: ")
    runs.command(Path("runs"), filters=None)
    shown = capsys.readouterr().out
    assert "unreadable" in shown
    assert "bad: config.yaml can't be read: " in shown
    assert watch._newest(Path("runs")) in (Path("runs/good"), Path("runs/config_alone"))


def test_watch_refuses_a_folder_whose_runs_can_all_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "runs/bad").mkdir(parents=True)
    (tmp_path / "runs/bad/config.yaml").touch()
    with pytest.raises(ConfigError, match="contains no readable run"):
        watch._newest(tmp_path / "runs")
