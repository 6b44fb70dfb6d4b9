"""Evaluations and checkpoints at intervals in epochs and at listed steps."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from support.configured import run_config
from support.logged_runs import train

from axonlaunch import checkpoint, config
from axonlaunch.config import ConfigError
from axonlaunch.config.values.intervals import StepInterval, is_due
from axonlaunch.events import Evaluated, Saved, StepLogged


def due_steps(interval: StepInterval, *, rows: int, batch: int = 8, last: int = 24) -> list[int]:
    return [
        step
        for step in range(1, last + 1)
        if is_due(interval, step, epoch=lambda steps: Fraction(steps * batch, rows))
    ]


@pytest.mark.parametrize(
    ("interval", "rows", "expected"),
    [
        ("1 epoch", 80, [10, 20]),
        ("1 epoch", 100, [13]),  # row 100 is in the 13th batch of 8, row 200 in the 25th
        ("0.5 epochs", 120, [8, 15, 23]),
        (".1 epoch", 100, [2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18, 19, 20, 22, 23, 24]),
        ("2 epochs", 80, [20]),
        ("0.01 epoch", 8, [*range(1, 25)]),
        (10, 80, [10, 20]),
        (0, 80, []),
        ([3, 17], 80, [3, 17]),
    ],
)
def test_interval_in_epochs_ends_with_step_that_reads_its_last_row(
    interval: StepInterval, rows: int, expected: list[int]
) -> None:
    assert due_steps(interval, rows=rows) == expected


def test_run_of_epochs_evaluates_and_saves_per_epoch(tmp_path: Path) -> None:
    overrides = ["data.num_samples=60", "train.epochs=2", "train.eval_every=1 epoch"]
    events = train(tmp_path, *overrides, "checkpoint.every='0.5 epoch'", "checkpoint.keep_last=9")
    epochs = {e.step: e.epoch for e in events if isinstance(e, StepLogged)}
    # 60 rows are 7.5 batches: the epochs end with rows 60 and 120.
    assert [e.step for e in events if isinstance(e, Evaluated)] == [8, 15]
    assert [e.step for e in events if isinstance(e, Saved)] == [4, 8, 12, 15]
    assert epochs[7] is not None
    assert epochs[8] is not None
    assert epochs[7] < 1 <= epochs[8]


def test_listed_steps_are_saved_and_kept(tmp_path: Path) -> None:
    train(tmp_path, "train.steps=6", "checkpoint.every=[1,3]", "checkpoint.keep_last=1")
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [1, 3, 6]


@pytest.mark.parametrize("key", ["train.eval_every", "checkpoint.every"])
def test_epochs_of_stream_without_length_are_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n' * 500)
    overrides = ["data=documents", f"data.files=[{tmp_path}/rows.jsonl]", "data.shuffle=shards"]
    overrides += [f"data.cache_dir={tmp_path}", "data.sequence_length=18", "strategy=single"]
    with pytest.raises(ConfigError, match=rf"{key}=1 epoch: the number of samples in an epoch is "):
        run_config([*overrides, f"{key}=1 epoch", "train.eval_batches=0"])


@pytest.mark.parametrize("interval", ["1 epoch", "'1 epoch'", '"1 epoch"', "1epoch"])
def test_epochs_are_read_from_command_line(interval: str) -> None:
    chosen = config.load([f"train.eval_every={interval}", f"checkpoint.every={interval}"])
    assert due_steps(chosen.train.eval_every, rows=80) == [10, 20]
    assert due_steps(chosen.checkpoint.every, rows=80) == [10, 20]
