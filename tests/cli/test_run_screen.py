"""The screen of a run in a terminal: figures in two columns, and curves as lines of braille."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, ConsoleDimensions
from support.run_folders import run_folder

from axonlaunch.cli.shared.braille import braille_line
from axonlaunch.cli.shared.run_screen import screen_of
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.system.storage.run_files import events_of_rank


@pytest.mark.parametrize(
    ("x", "y", "rows"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], ["⣠⠞"]),
        ([0, 3], [3, 0], ["⠙⢦"]),  # two points are joined
        ([0, 1, 2, 3], [5, 5, 5, 5], ["⠒⠒"]),  # a constant is in the middle
        ([0, 1, 2, 3], [0, None, None, 0.5], ["⡀⠈"]),  # a gap is not joined
        ([0, 1, 2, 3], [0, 0, 7, 7], ["⠀⡏", "⣀⡇"]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 1, 1, 1, 1, 1, 1], ["⠒⠒"]),  # means of two points
    ],
)
def test_curve_is_a_line_of_dots(x: list[float], y: list[float | None], rows: list[str]) -> None:
    drawn, low, high = braille_line(x, y, width=2, height=len(rows))
    assert drawn == rows
    assert low <= high


@pytest.mark.parametrize("width", [60, 80, 140])
def test_memory_loss_and_node_are_readable_at_each_width(width: int, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=300, ranks=2)
    use = {"host": "node-0", "cpu": 0.97, "memory_bytes": 2**30, "memory_total_bytes": 2**32}
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": 1002.0, "event": "system", **use}) + "\n")
    output = StringIO()
    console = Console(file=output, width=width, height=24)
    run = page_data([read_run(folder)])["runs"][0]
    console.print(screen_of(run, ConsoleDimensions(width, 24)))
    lines = output.getvalue().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "loss 1.7215 peak memory 1 MiB of the main rank's" in text
    assert "node node-0 processor 97% memory 1 GiB of 4 GiB" in text
    first = lines[lines.index("loss") + 1]
    assert 4.0 < float(first[:11]) < 4.25  # the highest loss
    assert set(first[11:]) & {chr(code) for code in range(0x2801, 0x2900)}


@pytest.mark.parametrize(
    ("nodes", "height", "line"),
    [
        (2, 24, "node node-1   processor 10%   memory 1 GiB of 4 GiB"),
        (7, 24, "processor 0% on node-0 to 60% on node-6, median 30%"),
        (20, 24, "processor 0% on node-0 to 190% on node-19, median 95%"),
    ],
)
def test_nodes_have_a_line_each_or_the_extremes_are_named(
    nodes: int, height: int, line: str, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "demo", steps=30)
    for node in range(nodes):
        use = {"cpu": node / 10, "memory_bytes": 2**30, "memory_total_bytes": 2**32}
        sample = {"time": 1002.0, "event": "system", "host": f"node-{node}", **use}
        with (folder / events_of_rank(node)).open("a") as stream:
            stream.write(json.dumps(sample) + "\n")
    output = StringIO()
    run = page_data([read_run(folder)])["runs"][0]
    Console(file=output, width=100).print(screen_of(run, ConsoleDimensions(100, height)))
    assert line in output.getvalue().splitlines()
    assert len(output.getvalue().splitlines()) <= height


def test_node_that_has_left_has_no_line(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=30)
    for node, times in ((0, range(0, 60, 5)), (1, range(0, 30, 5))):
        with (folder / events_of_rank(node)).open("a") as stream:
            for at in times:
                use = {"host": f"node-{node}", "cpu": 0.5, "gpu_use": [0.25, 0.75]}
                stream.write(json.dumps({"time": 1002.0 + at, "event": "system", **use}) + "\n")
    output = StringIO()
    run = page_data([read_run(folder)])["runs"][0]
    Console(file=output, width=100).print(screen_of(run, ConsoleDimensions(100, 24)))
    nodes = [line for line in output.getvalue().splitlines() if line.startswith("node ")]
    assert nodes == ["node node-0   processor 50%   GPU use 50%"]
