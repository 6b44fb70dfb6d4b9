"""Samples of nodes become charts by the time since the first launch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from support.run_folders import run_folder, write_lines

from axonlaunch.diagnostics.report.live_page_data import LivePageData
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.diagnostics.report.system_figures import system_of
from axonlaunch.system.storage.run_files import events_of_rank


def system_page(folder: Path, events: list[dict[str, Any]]) -> dict[str, Any]:
    write_lines(run_folder(folder, steps=1) / "events.jsonl", events)
    system = system_of(read_run(folder))
    assert system is not None
    return system


def sample(at: float, **figures: Any) -> dict[str, Any]:
    return {"time": at, "event": "system", "host": "node-0", **figures}


def test_lines_have_a_gap_between_attempts_and_a_curve_for_each_gpu(tmp_path: Path) -> None:
    launched = {"event": "launched", "host": "node-0"}
    events = [
        {"time": 100.0, **launched},
        sample(105.0, cpu=0.5, gpu_power_w=[100, 200]),
        {"time": 200.0, **launched},
        sample(205.0, cpu=0.25, gpu_power_w=[100]),
    ]
    system = system_page(tmp_path / "demo", events)
    x = [0.0, 5.0, 100.0, 105.0]
    assert [view["name"] for view in system["views"]] == ["node-0"]
    assert system["views"][0]["charts"] == [
        {
            "title": "processor",
            "unit": "share",
            "lines": [{"label": "share of all cores", "x": x, "y": [None, 0.5, None, 0.25]}],
        },
        {
            "title": "GPU power",
            "unit": "watts",
            "lines": [
                {"label": "GPU 0", "x": x, "y": [None, 100, None, 100]},
                {"label": "GPU 1", "x": x, "y": [None, 200, None, None]},
            ],
        },
    ]


def test_samples_of_weeks_on_8_gpus_stay_small(tmp_path: Path) -> None:
    gpus = {key: [0.5] * 8 for key in ("gpu_use", "gpu_power_w", "gpu_memory_bytes")}
    events = [sample(float(n), cpu=n % 7 / 7, **gpus) for n in range(0, 100_000, 7)]
    assert len(json.dumps(system_page(tmp_path / "demo", events))) < 1_000_000


def of_nodes(folder: Path, number: int, *, seconds: int = 60) -> dict[str, Any]:
    """Return the page of nodes that sample a second after each other; node N computes N percent."""
    run_folder(folder, steps=1)
    for node in range(number):
        events = [
            {**sample(at + node % 5, cpu=node / 100, **figures(node)), "host": f"node-{node}"}
            for at in range(100, 100 + seconds, 5)
        ]
        write_lines(folder / events_of_rank(8 * node), events)
    system = system_of(read_run(folder))
    assert system is not None
    return system


def figures(node: int) -> dict[str, Any]:
    return {"memory_total_bytes": 2**34, "memory_bytes": 2**30 + node, "gpu_use": [node / 100, 0]}


def test_each_of_few_nodes_has_a_line_and_a_view(tmp_path: Path) -> None:
    system = of_nodes(tmp_path / "demo", 3)
    names = ["node-0", "node-1", "node-2"]
    assert system["nodes"] == names
    assert [view["name"] for view in system["views"]] == ["all nodes", *names]
    charts = {chart["title"]: chart["lines"] for chart in system["views"][0]["charts"]}
    assert list(charts) == [
        "processor",
        "memory, of 16 GiB",
        "GPU use, mean of a node's GPUs",
    ]
    assert [line["label"] for line in charts["processor"]] == names
    for node, line in enumerate(charts["processor"]):
        assert set(line["y"]) == {node / 100}  # each span has a sample of each node
    assert set(charts["GPU use, mean of a node's GPUs"][2]["y"]) == {0.01}
    third = {chart["title"]: chart["lines"] for chart in system["views"][3]["charts"]}
    assert [line["label"] for line in third["GPU use"]] == ["GPU 0", "GPU 1"]


def test_100_nodes_are_statistics_that_name_the_nodes_of_the_extremes(tmp_path: Path) -> None:
    system = of_nodes(tmp_path / "demo", 100, seconds=3000)
    assert [view["name"] for view in system["views"]] == ["all nodes"]
    lines = system["views"][0]["charts"][0]["lines"]
    assert [line["label"] for line in lines] == ["lowest", "median", "highest"]
    lowest, median, highest = lines
    assert (lowest["y"][5], median["y"][5], highest["y"][5]) == (0.0, 0.495, 0.99)
    assert system["nodes"][lowest["nodes"][5]] == "node-0"
    assert system["nodes"][highest["nodes"][5]] == "node-99"
    assert len(json.dumps(system)) < 50_000


def test_nodes_of_one_host_are_told_apart_by_their_first_rank(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=1)
    write_lines(folder / "events.jsonl", [sample(100.0, cpu=0.5)])
    write_lines(folder / events_of_rank(2), [sample(101.0, cpu=0.25)])
    system = system_of(read_run(folder))
    assert system is not None
    assert system["nodes"] == ["node-0, rank 0", "node-0, rank 2"]


def test_nodes_without_a_shared_folder_are_counted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=1)
    (folder / "config.yaml").write_text("launch:\n  nproc: 8\n")
    started = {"time": 99.0, "event": "started", "world_size": 32}
    write_lines(folder / "events.jsonl", [started, sample(100.0, cpu=0.5)])
    system = system_of(read_run(folder))
    assert system is not None
    assert system["absent"] == 3


def test_live_page_gets_new_samples_of_another_node(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=1)
    write_lines(folder / "events.jsonl", [sample(100.0, cpu=0.5)])
    live = LivePageData([folder])
    assert live()["runs"][0]["system"]["nodes"] == ["node-0"]
    write_lines(folder / events_of_rank(2), [{**sample(101.0, cpu=0.25), "host": "node-1"}])
    deadline = time.monotonic() + 30
    while len(nodes := live()["runs"][0]["system"]["nodes"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert nodes == ["node-0", "node-1"]


def test_unreadable_samples_of_a_node_are_a_note(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=1)
    (folder / events_of_rank(8)).symlink_to(folder / "events.jsonl")
    (folder / events_of_rank(16)).write_text("no JSON\n")
    notes = page_data([read_run(folder)])["runs"][0]["notes"]
    assert notes == [
        "logs/rank_8.events.jsonl can't be read: is not a regular file",
        "1 lines of logs/rank_16.events.jsonl can't be read",
    ]


def test_samples_at_impossible_times_take_little_memory(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=1)
    write_lines(folder / "events.jsonl", [sample(0.0, cpu=0.5), sample(1.0, cpu=0.5)])
    lines = [sample(at, cpu=0.5) for at in (3e9, 3e9 + 1, 1e300, -5)]
    write_lines(folder / events_of_rank(2), lines)
    assert len(json.dumps(system_of(read_run(folder)))) < 20_000


def test_run_without_samples_has_no_chart_of_its_node(tmp_path: Path) -> None:
    assert page_data([read_run(run_folder(tmp_path / "demo"))])["runs"][0]["system"] is None


def test_last_span_is_left_out_until_each_node_has_a_sample_in_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=1)
    first = [sample(100.0 + at, cpu=0.5) for at in (0, 5, 10, 15, 20)]
    write_lines(folder / "events.jsonl", first)
    second = [{**sample(101.0 + at, cpu=0.25), "host": "node-1"} for at in (0, 5, 10)]
    write_lines(folder / events_of_rank(2), second)
    system = system_of(read_run(folder))
    assert system is not None
    lines = system["views"][0]["charts"][0]["lines"]
    assert [line["y"] for line in lines] == [[0.5, 0.5], [0.25, 0.25]]


def test_figures_of_gpus_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=1)
    lists: list[Any] = [[], [None], ["a", 1], [[1], [2]], [10**300, 1e308, 1e308]]
    for node in range(2):
        wrong = [
            sample(100.0 + at, gpu_use=value, gpu_power_w=value, gpu_memory_bytes=value)
            for at, value in enumerate(lists)
        ]
        write_lines(folder / events_of_rank(node), wrong)
    text = json.dumps(system_of(read_run(folder)), allow_nan=False)
    assert "GPU power" in text  # the last has a number for each GPU
