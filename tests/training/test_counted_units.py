"""Counts of images and other samples are named by their unit, not tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.configured import run_config

from axonlaunch.comm import World
from axonlaunch.data.datasets.dataset import counted_in
from axonlaunch.data.datasets.user_datasets.adapters import adapt_dataset
from axonlaunch.planning.records import Plan, Planned, Workload
from axonlaunch.planning.reports.plan_table import build_plan_table
from axonlaunch.system.text.units import named_by_unit, rate_in
from axonlaunch.training import worker
from axonlaunch.training.loggers.logger import Logger, RunInfo
from axonlaunch.training.loggers.registry import register_logger

IMAGES = ["model=mlp", "data=synthetic_images", "train.steps=2", "train.log_every=1", "name=run"]
IMAGES += ["train.global_batch_size=8", "launch.nproc=1", "train.eval_batches=1"]


class Units(Logger):
    """Keeps the names of the values that it gets."""

    names: set[str] = set()
    counted: list[str] = []

    def start(self, run: RunInfo) -> None:
        self.counted.append(run.counted)

    def log(self, metrics: Mapping[str, int | float], *, step: int) -> None:
        self.names.update(metrics)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on images."""
    register_logger("units_test")(Units)
    folder = tmp_path_factory.mktemp("run")
    chosen = run_config([*IMAGES, "loggers=[tensorboard,units_test]"])
    chosen = dataclasses.replace(chosen, run_dir=str(folder))
    World.mock(1).run(lambda world: worker.run(chosen, world))
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_metrics_of_images_are_named_images(folder: Path) -> None:
    first = lines(folder / "metrics.jsonl")[0]
    assert first["images"] == 8
    assert first["images_seen"] == 8
    assert rate_in(first) == ("images", first["images_per_s"])
    assert not [name for name in first if "tokens" in name]


def test_loggers_of_images_get_no_number_of_tokens(folder: Path) -> None:
    assert Units.counted == ["images"]
    assert {"images", "images_per_s", "images_seen", "eval_images"} <= Units.names
    assert not [name for name in Units.names if "tokens" in name]


def test_events_of_images_are_named_images(folder: Path) -> None:
    [evaluated] = [e for e in lines(folder / "events.jsonl") if e["event"] == "evaluated"]
    assert "eval_images" in evaluated
    assert "eval_tokens" not in evaluated


def test_tensorboard_shows_images_per_second(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert "images_per_s" in tags
    assert not [tag for tag in tags if "tokens" in tag]


@pytest.mark.parametrize(
    ("inputs", "targets", "unit"),
    [
        (np.zeros((3, 8, 8), np.float32), 1, "images"),
        (np.zeros((3, 8, 8), np.uint8), 1, "images"),
        (np.zeros((3, 8, 8), np.float32), 0.5, "images"),
        (np.zeros((3, 8, 8), np.float32), np.zeros((8, 8), np.int64), "targets"),
        (np.zeros(5, np.float32), 1, "samples"),
        (np.zeros(5, np.float32), np.zeros(2, np.float32), "targets"),
        (np.zeros(12, np.int64), 1, "samples"),
        (np.zeros(12, np.int64), np.zeros(12, np.int64), "tokens"),
    ],
)
def test_pairs_are_counted_by_inputs_with_one_target(inputs: Any, targets: Any, unit: str) -> None:
    pairs = [(inputs, np.asarray(targets))] * 40
    dataset = adapt_dataset(
        pairs,
        collate=None,
        eval_fraction=None,
        num_classes=2,
        refusal=ValueError,
        description="pairs",
    )
    assert counted_in(dataset) == unit


def test_plan_of_a_classifier_shows_samples_per_second() -> None:
    layout = Planned(
        *([], "single", {}, 0, 0, 0, "fits"),
        tokens_per_s_per_device=8.0,
        step_s=1.0,
        mfu=None,
        breakdown={},
    )
    for mfu, unit in ((None, "samples"), (0.4, "tokens")):
        planned = dataclasses.replace(layout, mfu=mfu)
        plan = Plan(workload=cast("Workload", None), searched=1, candidates=[planned])
        headers = [column.header for column in build_plan_table(plan).columns]
        assert f"{unit}/s/device" in headers


def test_token_metric_names_are_unchanged() -> None:
    fields = {"tokens": 1, "tokens_per_s": 2.0, "loss": 3.0}
    assert named_by_unit(fields, "tokens") == fields
    assert named_by_unit(fields, "samples") == {"samples": 1, "samples_per_s": 2.0, "loss": 3.0}
