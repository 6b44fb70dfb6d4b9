"""``ax.load_run``: a run's folder as columns, for scripts and notebooks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.run_folders import run_folder, write_lines

import axonlaunch as ax


def test_metrics_and_evaluations_are_columns(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=4, loss=lambda step: 1.0 / step)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 0.5, "loads": [1, 2]}) + "\n")
        file.write(json.dumps({"step": 5, "eval_loss": 0.75, "eval_accuracy": 0.5}) + "\n")
    run = ax.load_run(folder)
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(run.metrics["loss"], [1, 1 / 2, 1 / 3, 1 / 4, 0.5])
    assert run.metrics["loads"].tolist() == [None] * 4 + [[1, 2]]
    assert np.isnan(run.metrics["tokens_per_s"][-1])
    assert run.evaluations["eval_accuracy"][-1] == 0.5
    assert "eval_loss" not in run.metrics
    assert (run.name, run.config["train.steps"]) == ("run", 4)


def test_frame_of_pandas_has_a_row_per_logged_step(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = ax.load_run(str(run_folder(tmp_path / "run", steps=3)))
    frame = run.frame()
    assert len(frame) == 3
    assert frame["loss"].tolist() == run.metrics["loss"].tolist()
    assert run.frame("evaluations")["eval_loss"].tolist() == [1.5]
    assert run.frame("system").empty
    with pytest.raises(ValueError, match="use 'metrics', 'evaluations' or 'system'"):
        run.frame("samples")  # type: ignore[arg-type]


def test_samples_of_each_node_are_columns_with_one_per_gpu(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    folder = run_folder(tmp_path / "run")
    (folder / "logs").mkdir(exist_ok=True)
    for host, file in (("a", "events.jsonl"), ("b", "logs/rank_2.events.jsonl")):
        samples = [
            {"event": "system", "time": second, "host": host, "cpu": 0.5, "gpu_use": [0.25, second]}
            for second in (1.0, 2.0)
        ]
        write_lines(folder / file, samples)
    run = ax.load_run(folder)
    assert list(run.system) == ["a", "b"]
    assert list(run.system["b"]) == ["time", "cpu", "gpu_use_0", "gpu_use_1"]
    np.testing.assert_allclose(run.system["b"]["gpu_use_1"], [1.0, 2.0])
    assert run.frame("system")["node"].tolist() == ["a", "a", "b", "b"]


def test_folder_without_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs/demo")
    with pytest.raises(ax.ConfigError, match=r"demo: .*; did you mean runs/demo\?"):
        ax.load_run("demo")
