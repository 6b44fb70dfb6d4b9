"""Runs on parallel axes: positions of settings, and the metric that ranks the runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import run_folder

from axonlaunch.diagnostics.report.comparison import ranking
from axonlaunch.diagnostics.report.coordinates import coordinates_of
from axonlaunch.diagnostics.report.record.run_record import RunRecord, read_run


def runs_of(
    folder: Path, values: list[Any], *, evaluations: Sequence[dict[str, Any]] = ()
) -> list[RunRecord]:
    runs = []
    for number, value in enumerate(values):
        extra = f"optimizer:\n  lr: {json.dumps(value)}\n"
        run = run_folder(
            folder / str(number), steps=3, extra_config=extra, loss=lambda step, n=number: 1.0 + n
        )
        metrics = run / "metrics.jsonl"
        lines = [text for text in metrics.read_text().splitlines() if "eval_loss" not in text]
        lines += [json.dumps({"step": 3, **line}) for line in evaluations[number : number + 1]]
        metrics.write_text("\n".join(lines) + "\n")
        runs.append(read_run(run))
    return runs


def axes(runs: list[RunRecord]) -> dict[str, Any]:
    found = coordinates_of(runs)
    assert found is not None
    return {axis["name"]: axis for axis in found["axes"]}


@pytest.mark.parametrize(
    ("values", "positions"),
    [
        ([1e-4, 1e-3, 1e-2], [0.0, 0.5, 1.0]),  # of different magnitudes: logarithmic
        ([1, 2, 3], [0.0, 0.5, 1.0]),
        ([0, 30, 40], [0.0, 0.75, 1.0]),
        (["adamw", "sgd", "muon"], [1.0, 0.5, 0.0]),
        ([True, False, True], [1.0, 0.0, 1.0]),
        ([None, 0.5, 1.0], [1.0, 0.5, 0.0]),  # not all are numbers
    ],
)
def test_settings_are_placed_on_their_axis(
    values: list[Any], positions: list[float], tmp_path: Path
) -> None:
    assert axes(runs_of(tmp_path, values))["optimizer.lr"]["positions"] == positions


def test_axis_of_many_numbers_has_round_labels_between_its_ends(tmp_path: Path) -> None:
    axis = axes(runs_of(tmp_path, [0.1 * n for n in range(11)]))["optimizer.lr"]
    assert axis["ticks"] == [(0, "0"), (0.25, "0.25"), (0.5, "0.5"), (0.75, "0.75"), (1, "1")]


def test_last_axis_is_the_metric_and_best_has_quality_one(tmp_path: Path) -> None:
    found = coordinates_of(runs_of(tmp_path, [1, 2, 3]))
    assert found is not None
    assert [axis["name"] for axis in found["axes"]] == ["optimizer.lr", "loss"]
    assert found["axes"][-1]["positions"] == [0.0, 0.5, 1.0]
    assert found["quality"] == [1.0, 0.5, 0.0]


BETTER = {"metrics": [{"name": "custom", "target": "m:error", "higher_is_better": False}]}


@pytest.mark.parametrize(
    ("best", "metrics", "order"),
    [
        ("accuracy", {}, [1, 2, 0]),
        ("error", BETTER, [0, 2, 1]),
        ("loss", {}, [2, 1, 0]),
        ("absent", {}, [2, 1, 0]),  # nothing measured it, so the evaluation loss decides
    ],
)
def test_runs_are_ranked_by_best_metric(
    best: str, metrics: dict[str, Any], order: list[int], tmp_path: Path
) -> None:
    evaluations = [
        {"eval_loss": 3.0 - n, f"eval_{best}": value}
        for n, value in enumerate([0.1, 0.9, 0.5])
        if best not in ("loss", "absent")
    ] or [{"eval_loss": 3.0 - n} for n in range(3)]
    runs = runs_of(tmp_path, [1, 2, 3], evaluations=evaluations)
    for run in runs:
        run.config.update({"train.best_metric": best, **metrics})
    assert ranking(runs).order() == order


def test_runs_with_equal_settings_have_no_axes(tmp_path: Path) -> None:
    assert coordinates_of(runs_of(tmp_path, [1, 1])) is None


def test_at_most_twelve_settings_have_axes(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, [1, 2])
    for number, run in enumerate(runs):
        run.config.update({f"data.key{n}": number for n in range(14)})
    found = coordinates_of(runs)
    assert found is not None
    assert (len(found["axes"]), found["left_out"]) == (13, 3)
