"""Counts of images and other samples are named by their unit, not tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from configured import run_config

from axonlaunch.comm import World
from axonlaunch.system.text.units import named_by_unit, rate_in
from axonlaunch.training import worker
from axonlaunch.training.loggers.base import Logger, RunInfo
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


def test_token_metric_names_are_unchanged() -> None:
    fields = {"tokens": 1, "tokens_per_s": 2.0, "loss": 3.0}
    assert named_by_unit(fields, "tokens") == fields
    assert named_by_unit(fields, "samples") == {"samples": 1, "samples_per_s": 2.0, "loss": 3.0}
