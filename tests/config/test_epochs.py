"""``train.epochs`` instead of ``train.steps``."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.configured import estimate_config, run_config

from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.config.optimization.schedules import CosineConfig

DATA = ["data=synthetic_tokens", "data.num_samples=100", "strategy=single"]
DATA += ["train.global_batch_size=8", "data.num_eval_samples=16"]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 13), (2, 25), (0.5, 7), (0.01, 1), (1.12, 14)])
def test_epochs_are_the_steps_in_which_every_row_was_seen_as_often(
    epochs: float, steps: int
) -> None:
    train = run_config([*DATA, f"train.epochs={epochs}"]).train
    assert (train.steps, train.epochs) == (steps, None)


def test_an_epoch_of_text_is_of_packed_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "ten bytes!"}\n' * 101)
    overrides = [f"data.files=[{tmp_path}/rows.jsonl]", f"data.cache_dir={tmp_path}"]
    overrides += ["data.held_out=1", "data.sequence_length=18", "train.eval_batches=0"]
    chosen = ["data=documents", *DATA[2:4], *overrides, "train.epochs=3"]
    assert run_config(chosen).train.steps == 3 * 50 // 8 + 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.epochs=1", "train.steps=9"],
            "train.epochs=1.0: train.steps is 9; use one of them",
        ),
        (["train.steps=auto"], "train.steps=auto: is computed from train.epochs, which is"),
        (["train.epochs=0"], "train.epochs=0: "),
        (
            ["scheduler.warmup_steps=3", "scheduler.warmup_ratio=0.1"],
            "scheduler.warmup_ratio=0.1: scheduler.warmup_steps is set too; use one of them",
        ),
        (
            ["train.early_stop=2", "train.eval_every=0"],
            "train.early_stop=2: nothing is evaluated before the end: train.eval_every is 0; use ",
        ),
    ],
)
def test_contradictory_steps_and_epochs_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load([*DATA, *overrides])
    assert str(raised.value).startswith(message)


def test_a_number_of_steps_in_a_users_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ntrain:\n  steps: 7\n")
    with pytest.raises(ConfigError, match=r"train\.steps is 7; use one of them"):
        config.load([*DATA, "experiment=mine", "train.epochs=1"], config_dirs=[tmp_path])


def test_warm_up_too_long_for_the_epochs_is_refused_once_they_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.warmup_steps=13: train\.steps is 13; use"):
        run_config([*DATA, "train.epochs=1", "scheduler.warmup_steps=13"])


def test_warmup_ratio_is_a_share_of_the_run() -> None:
    assert CosineConfig(warmup_ratio=0.1).warmup(250) == 25
    assert CosineConfig().warmup(250) == 16
    assert CosineConfig(warmup_steps=3).warmup(250) == 3


def test_an_estimate_of_epochs_reads_no_file() -> None:
    overrides = ["data=documents", "data.files=[none.jsonl]", "train.epochs=2", "strategy=single"]
    assert estimate_config(overrides).train.num_steps > 0
