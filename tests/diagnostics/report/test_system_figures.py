"""Samples of a node become charts by the time since the first launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_folders import run_folder, write_lines

from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.diagnostics.report.system_figures import system_of


def system_page(folder: Path, events: list[dict[str, Any]]) -> dict[str, Any]:
    write_lines(run_folder(folder, steps=1) / "events.jsonl", events)
    system = system_of(read_run(folder))
    assert system is not None
    return system


def sample(time: float, **figures: Any) -> dict[str, Any]:
    return {"time": time, "event": "system", "host": "node-0", **figures}


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
    assert system["charts"] == [
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


def test_run_without_samples_has_no_chart_of_its_node(tmp_path: Path) -> None:
    assert page_data([read_run(run_folder(tmp_path / "demo"))])["runs"][0]["system"] is None
