"""Schedules by shares of the run, and schedules of users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.logged_runs import lines, train
from torch import nn
from transformers import (
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
)

import axonlaunch as ax
from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.config.optimization.schedules import CosineConfig, InverseSqrtConfig, WSDConfig
from axonlaunch.engines.optimizer.schedules import learning_rate
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.comparison.schedule_check import schedule_problems
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

SMALL = ["model.num_hidden_layers=1", "model.hidden_size=16", "data=synthetic_tokens"]
SMALL += ["data.sequence_length=16", "train.global_batch_size=8"]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schedules.py").write_text(
        "def inverse_root(step, steps, warmup=4):\n"
        "    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)\n"
        "def broken(step, steps):\n"
        "    return None if step > 3 else 1.0\n"
        "def failing(step, steps):\n"
        "    return 1 / 0\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def inverse_root(step: int, warmup: int) -> float:
    return float(min((step + 1) / warmup, math.sqrt(warmup / (step + 1))))


def test_wsd_decays_in_a_share_of_the_run() -> None:
    schedule = WSDConfig(warmup_ratio=0.1, decay_ratio=0.25)
    rates = [learning_rate(schedule, step, peak=2.0, steps=40) for step in range(40)]
    assert rates[4:30] == [2.0] * 26
    assert rates[30:] == pytest.approx([2.0 * (1 - (step + 1) / 10) for step in range(10)])
    assert WSDConfig().decay(100) == 20


def test_cosine_falls_to_minimum_rate_as_in_transformers() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    # transformers reaches the minimum one step after the last one; here the last step has it.
    of_transformers = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 0, 10, min_lr_rate=0.1)
    schedule = CosineConfig(warmup_steps=0, final_lr_ratio=0.1)
    for step in range(11):
        ours = learning_rate(schedule, step, peak=2.0, steps=11)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        of_transformers.step()


@pytest.mark.parametrize("warmup", [0, 4])
def test_inverse_sqrt_after_the_warmup_equals_transformers(warmup: int) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    of_transformers = get_inverse_sqrt_schedule(optimizer, warmup)
    schedule = InverseSqrtConfig(warmup_steps=warmup)
    for step in range(40):
        ours = learning_rate(schedule, step, peak=2.0, steps=40)
        if step >= warmup:
            assert ours == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        of_transformers.step()


def test_custom_schedule_gives_rate_of_each_step(tmp_path: Path) -> None:
    chosen = ["scheduler=custom", "scheduler.target=my_schedules:inverse_root"]
    overrides = ["optimizer.lr=0.01", "train.steps=9", "scheduler.arguments={warmup: 3}"]
    overrides += ['optimizer.groups={"*.bias": {lr_scale: 2}}']
    train(tmp_path / "run", *chosen, *overrides, ranks=2)
    rates = [line["lr"] for line in lines(tmp_path / "run") if "lr" in line]
    assert rates == pytest.approx([0.01 * inverse_root(step, 3) for step in range(9)])


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    name: str = "root_of_test"
    warmup_steps: int = 5  # a key that included schedules have too


@pytest.mark.parametrize("is_typed", [False, True])
def test_registered_schedule_is_verified(is_typed: bool) -> None:
    name, options = f"root_{is_typed}", "scheduler.arguments={warmup: 6}"
    if is_typed:

        @ax.register_scheduler(name, config=RootConfig)
        def of_config(step: int, steps: int, options: RootConfig) -> float:
            return inverse_root(step, options.warmup_steps)

        options = "scheduler.warmup_steps=6"
    else:

        @ax.register_scheduler(name)
        def of_arguments(step: int, steps: int, warmup: int = 5) -> float:
            """Inverse root."""
            return inverse_root(step, warmup)

    chosen = run_config([*SMALL, f"scheduler={name}", options, "launch.nproc=2"])
    assert learning_rate(chosen.scheduler, 2, peak=1.0, steps=9) == pytest.approx(0.5)
    assert not list(schedule_problems(chosen))
    verdict = compare.on_mock(chosen, ComparisonPlan(steps=2))
    assert verdict.failure is None
    assert verdict.passed, verdict.differences


CUSTOM = ["scheduler=custom", "strategy=single", *SMALL]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["scheduler.target=my_schedules:broken", "train.steps=8"],
            "scheduler.target=my_schedules:broken: it returns None for step 4 of 8; return a number"
            " from 0, by which the peak rate is multiplied",
        ),
        (
            ["scheduler.target=my_schedules:failing"],
            "scheduler.target=my_schedules:failing: computing the rate of step 0 failed with "
            "ZeroDivisionError: division by zero",
        ),
        (
            ["scheduler.target=my_schedules:missing"],
            "scheduler.target=my_schedules:missing: ",
        ),
        (
            ["scheduler.target=my_schedules:number"],
            "scheduler.target=my_schedules:number: is int, not a class or function",
        ),
        (
            ["scheduler.target=my_schedules:inverse_root", "scheduler.arguments={warm: 3}"],
            "scheduler.arguments.warm=3: ",
        ),
    ],
)
def test_wrong_custom_schedule_is_refused_before_start(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config([*CUSTOM, *overrides])
    assert len(raised.value.problems) == 1
    assert str(raised.value).startswith(message)


def test_unknown_argument_of_registered_schedule_is_refused() -> None:
    def flat(step: int, steps: int, level: float = 1.0) -> float:
        return level

    ax.register_scheduler("flat_of_test")(flat)
    with pytest.raises(ConfigError, match="there is no argument"):
        config.load(["scheduler=flat_of_test", "scheduler.arguments={levl: 2}"])


def test_register_scheduler_needs_dataclass_with_name() -> None:
    class Options:
        pass

    wrong: Any = Options
    with pytest.raises(ValueError, match="it is not a dataclass with a field name"):
        ax.register_scheduler("wrong_of_test", config=wrong)
