"""``train -m --samples N``: runs drawn at random from values, ranges and intervals."""

from __future__ import annotations

import math

import pytest

from axonlaunch.config import Composer, ConfigError


def drawn(*overrides: str, samples: int = 200) -> list[dict[str, str]]:
    runs = Composer().sweep(list(overrides), samples=samples)
    return [dict(word.split("=", 1) for word in run) for run in runs]


def test_samples_are_of_values_and_ranges_and_the_same_in_every_call() -> None:
    runs = drawn("seed=1,2,3", "train.steps=range(2,8,2)", "name=x")
    assert {run["seed"] for run in runs} == {"1", "2", "3"}
    assert {run["train.steps"] for run in runs} == {"2", "4", "6"}
    assert {run["name"] for run in runs} == {"x"}
    assert runs == drawn("seed=1,2,3", "train.steps=range(2,8,2)", "name=x")
    assert (
        drawn("seed=1,2,3", samples=2) == [{"seed": run["seed"]} for run in drawn("seed=1,2,3")][:2]
    )


def test_interval_is_uniform_or_uniform_in_the_logarithm() -> None:
    values = [float(run["a"]) for run in drawn("a=interval(0.0,10.0)", samples=2000)]
    assert 0 <= min(values) < max(values) <= 10
    assert abs(sum(values) / len(values) - 5) < 0.3
    logs = [
        math.log10(float(run["a"])) for run in drawn("a=tag(log,interval(1e-4,1e-2))", samples=2000)
    ]
    assert -4 <= min(logs) < max(logs) <= -2
    assert abs(sum(logs) / len(logs) + 3) < 0.06
    whole = {run["a"] for run in drawn("a=int(interval(2,4))")}
    assert whole == {"2", "3", "4"}
    sizes = [int(run["a"]) for run in drawn("a=tag(log,int(interval(16,4096)))", samples=2000)]
    assert 16 <= min(sizes) < max(sizes) <= 4096
    assert abs(sum(math.log2(size) for size in sizes) / len(sizes) - 8) < 0.2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a=interval(2.0,1.0)", "the first number must be below the second"),
        ("a=tag(log,interval(0.0,1.0))", "a logarithm needs numbers above 0"),
    ],
)
def test_interval_that_can_not_be_drawn_from_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drawn(override)


def test_samples_of_settings_that_do_not_vary_are_refused() -> None:
    with pytest.raises(ConfigError, match="--samples: no key has several values"):
        drawn("train.steps=2")


def test_interval_without_samples_names_the_option() -> None:
    with pytest.raises(ConfigError, match="or add --samples N to draw N runs from it"):
        Composer().sweep(["a=interval(1,2)"])
