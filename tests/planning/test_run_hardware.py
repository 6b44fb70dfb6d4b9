"""For which runs a step's time is predicted during training, and with which hardware figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.configured import run_config
from support.run_folders import run_folder

from axonlaunch.diagnostics.doctor import measured_hardware
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.planning.throughput.predicted_parts import predict_step
from axonlaunch.planning.throughput.run_hardware import hardware_of_run
from axonlaunch.system.processes.forked_map import map_forked


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["launch.backend=gloo"], "set hardware=..., for example hardware=h100_80gb"),
        (["launch.backend=mock", "hardware=h100_80gb"], "ranks of launch.backend=mock take turns"),
        (
            ["launch.backend=gloo", "hardware=cpu"],
            "with 2 ranks; axonlaunch plan hardware=cpu --devices 2 measures it",
        ),
        (
            ["launch.backend=gloo", "hardware=cpu", "launch.nproc=1"],
            "with 1 rank; axonlaunch plan hardware=cpu --devices 1 measures it",
        ),
    ],
)
def test_unpredicted_step_time_has_reason(
    overrides: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_hardware, "_read_kept", lambda ranks: None)
    hardware, said = hardware_of_run(run_config(["launch.nproc=2", *overrides]))
    assert hardware is None
    assert reason in said


def test_step_prediction_uses_hardware_or_measured_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        measured_hardware, "_read_kept", lambda ranks: {"fp32_tflops": 10.0 * ranks}
    )
    overrides = ["launch.backend=gloo", "launch.nproc=4"]
    measured, _ = hardware_of_run(run_config([*overrides, "hardware=cpu"]))
    named, _ = hardware_of_run(run_config([*overrides, "hardware=h200"]))
    assert measured is not None
    assert measured.fp32_tflops == 40.0
    assert named is not None
    assert named.name == "h200"


@pytest.mark.slow
def test_a_predicted_step_has_parts_and_a_round_that_its_page_shows(
    tmp_path: Path,
) -> None:
    overrides = ["strategy=pipeline", "launch.nproc=2", "hardware=h100_80gb", "launch.backend=gloo"]
    overrides += [
        "model.num_hidden_layers=2",
        "train.micro_batch_size=2",
        "train.global_batch_size=8",
    ]
    config = run_config(overrides)
    [step] = map_forked([lambda: predict_step(config)])
    assert sum(step.parts.values()) == pytest.approx(step.step_s)
    assert {"matrix products", "attention", "exposed communication pp", "idle"} <= {*step.parts}
    assert len(step.pipeline) == 2 * 2 * 4  # two ranks, forward and backward of 4 micro-batches
    folder = run_folder(tmp_path / "demo")
    (folder / "step_time.json").write_text(json.dumps(vars(step)))
    shown = page_data([read_run(folder)])["runs"][0]["steps"]
    assert [bar["name"] for bar in shown["bars"]] == ["predicted for h100_80gb"]
    assert shown["measured"] == pytest.approx(0.1)
    assert [len(pipeline["actions"]) for pipeline in shown["pipelines"]] == [16]
