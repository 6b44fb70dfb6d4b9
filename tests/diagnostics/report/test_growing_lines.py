"""Only new lines of a growing file are read, but all lines of a rewritten file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.run_folders import run_folder, write_lines

from axonlaunch.diagnostics.report.growing_lines import GrowingLines
from axonlaunch.diagnostics.report.live_page_data import LivePageData


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": step} for step in range(100)])
    return file


def steps(growing: GrowingLines) -> list[int]:
    growing.read()
    return [line["step"] for line in growing.lines]


def test_known_lines_are_not_read_again(file: Path) -> None:
    growing = GrowingLines(file)
    assert steps(growing) == [*range(100)]
    content = file.read_bytes().replace(b'"step": 7}', b'"step": 8}', 1)
    with file.open("r+b") as stream:
        stream.write(content + b'{"step": 100}\n')
    assert steps(growing) == [*range(101)]


def test_half_a_line_is_read_once_it_is_whole(file: Path) -> None:
    growing = GrowingLines(file)
    for text, number in (('{"step": 100}\n{"st', 101), ('ep": 101}\n', 102)):
        with file.open("a") as stream:
            stream.write(text)
        assert steps(growing) == [*range(number)]
    assert growing.unreadable == 0


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_that_was_written_anew_is_read_from_its_beginning(
    is_replaced: bool, file: Path
) -> None:
    growing = GrowingLines(file)
    growing.read()
    if is_replaced:
        file.rename(file.with_suffix(".1"))
    write_lines(file, [{"step": 2 * step} for step in range(200)])
    assert steps(growing) == [*range(0, 400, 2)]


def test_a_file_that_is_gone_has_no_lines_until_it_is_there_again(file: Path) -> None:
    growing = GrowingLines(file)
    growing.read()
    file.unlink()
    assert steps(growing) == []
    write_lines(file, [{"step": 1}, {"step": 2}])
    assert steps(growing) == [1, 2]


def test_data_that_took_long_to_make_is_not_made_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from axonlaunch.diagnostics.report import live_page_data

    now = [0.0]
    monkeypatch.setattr(live_page_data.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        live_page_data.time, "thread_time", iter(range(100)).__next__
    )  # a second each
    folder = run_folder(tmp_path / "demo", steps=3)
    data = LivePageData([folder])

    def shown() -> float:
        return float(data()["runs"][0]["series"]["loss"][0][-1])

    assert shown() == 3
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 4, "loss": 1.0}) + "\n")
    now[0] = 19.0
    assert shown() == 3
    now[0] = 21.0
    assert shown() == 4
