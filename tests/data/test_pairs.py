"""Datasets of pairs: arbitrary target tensors, and a custom loss that sees only counted samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.configured import estimate_config, run_config

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine
from axonlaunch.planning.memory import estimate as memory_estimate
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

MODULE = """
import torch
from torch.nn.functional import one_hot

import axonlaunch as ax


class Line(torch.utils.data.Dataset):
    '''Numbers and their halves, as a tensor; what is held out is far from the rest.'''

    def __init__(self, count=100, classes=False):
        self.count = count
        if classes:
            self.num_classes = 4

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.full((1, 1, 1), index / 8)
        return x, index % 4 if hasattr(self, "num_classes") else (x[0, 0] / 2)


class Divided(Line):
    def __init__(self):
        super().__init__(count=100, classes=True)
        self.held_out = [super(Divided, self).__getitem__(index) for index in range(1000, 1003)]


class Mixed(Line):
    def __getitem__(self, index):
        return torch.zeros(1, 1, 1), index if index < 50 else index + 0.5


class Slope(torch.nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.linear = torch.nn.Linear(1, outputs)

    def forward(self, x):
        return self.linear(x.flatten(1))


@ax.register_loss("squared_of_a_test")
def squared(outputs, batch):
    assert outputs.shape == batch["targets"].shape
    return (outputs - batch["targets"]).square().sum()


@ax.register_loss("classes_of_a_test")
def classes(outputs, batch):
    return (outputs - one_hot(batch["targets"], 4)).square().sum()
"""
CHOSEN = ["plugins=[pairs_of_a_test]", "data=custom", "data.target=pairs_of_a_test:Line"]
CHOSEN += ["model=custom", "model.target=pairs_of_a_test:Slope"]
CHOSEN += ["train.steps=2", "train.global_batch_size=8", "train.micro_batch_size=2"]
CHOSEN += ["train.eval_batches=2", "optimizer=sgd"]
CLASSES = ["data.arguments={classes: true}", "model.arguments={outputs: 4}"]
CLASSES += ["train.loss=classes_of_a_test"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create a module in the working folder."""
    (tmp_path / "pairs_of_a_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    from axonlaunch.config.options.losses import LOSSES

    sys.modules.pop("pairs_of_a_test", None)
    for name in [name for name in LOSSES.names() if name.endswith("_of_a_test")]:
        del LOSSES._entries[name]


def evaluated(*overrides: str) -> tuple[float, float]:
    """Return the mean loss and the count of an evaluation before the first step."""
    config = run_config([*CHOSEN, *overrides])

    def on_rank(world: World) -> list[float]:
        layout = Layout.of(config, world_size=world.world_size)
        loader = rank_loader(
            config, data.build_dataset(config.data), layout=layout, rank=world.rank
        )
        engine = build_engine(config, world)
        return [float(x) for x in sum(engine.evaluate(batch) for batch in loader.eval_batches())]

    totals = World.mock(num_ranks(config)).run(on_rank)
    loss, count = (sum(rank[column] for rank in totals) for column in (0, 1))
    return loss / count, count


def by_hand(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *overrides: str) -> float:
    """Return the same mean, with each held-out sample once."""
    from axonlaunch.models.build import build_model

    config: RunConfig = run_config([*CHOSEN, *overrides, "strategy=single", "launch.nproc=1"])
    pairs = sys.modules["pairs_of_a_test"].Line(**config.data.arguments)
    held_out = [pairs[index] for index in range(95, 100)]
    model = build_model(config.model, seed=config.seed)
    outputs = model(torch.stack([inputs for inputs, _ in held_out]))
    targets = torch.stack([torch.as_tensor(target) for _, target in held_out])
    return float(loss(outputs, targets).detach()) / len(held_out)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_custom_loss_is_evaluated_once_per_held_out_sample(ranks: int) -> None:
    def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - torch.nn.functional.one_hot(targets, 4)).square().sum()

    mean, count = evaluated(*CLASSES, "strategy=fsdp", f"launch.nproc={ranks}")
    assert count == 5
    assert mean == pytest.approx(by_hand(squared, *CLASSES))


def test_targets_that_are_no_integers_keep_their_fractions() -> None:
    overrides = ["train.loss=squared_of_a_test", "strategy=ddp", "launch.nproc=2"]
    mean, count = evaluated(*overrides)
    expected = by_hand(lambda outputs, targets: (outputs - targets).square().sum(), overrides[0])
    assert (mean, count) == (pytest.approx(expected), 5)


def test_verify_compares_float_targets_with_one_process() -> None:
    config = run_config(
        [*CHOSEN, "train.loss=squared_of_a_test", "strategy=fsdp", "launch.nproc=2"]
    )
    verdict = on_mock(config, ComparisonPlan(steps=2, beyond=True))
    assert verdict.passed, verdict.failure


def test_float_targets_without_custom_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.loss=null: .*float targets"):
        run_config([*CHOSEN, "strategy=single", "launch.nproc=1"])


def test_a_fraction_among_integers_is_refused_with_its_sample() -> None:
    overrides = [*CHOSEN, *CLASSES, "data.target=pairs_of_a_test:Mixed", "data.arguments={}"]
    overrides += ["data.num_classes=4", "strategy=single", "launch.nproc=1"]
    dataset = data.build_dataset(run_config(overrides).data)
    with pytest.raises(ConfigError, match=r"sample 60 are float64, .*sample 0 an integer; give"):
        dataset.samples([3, 60], split="train")


def test_paired_dataset_evaluates_its_held_out_samples() -> None:
    overrides = [*CHOSEN, *CLASSES[1:], "data.target=pairs_of_a_test:Divided"]
    config = run_config([*overrides, "strategy=single", "launch.nproc=1"])
    dataset = data.build_dataset(config.data)
    assert (dataset.num_samples, dataset.num_eval_samples) == (100, 3)
    assert dataset.samples([0, 2], split="eval").inputs.flatten().tolist() == [125.0, 125.25]


def test_verify_gives_custom_loss_only_existing_classes() -> None:
    config = run_config([*CHOSEN, *CLASSES, "strategy=fsdp", "launch.nproc=2"])
    verdict = on_mock(config, ComparisonPlan(steps=2, beyond=True))
    assert verdict.passed, verdict.failure


def test_estimate_gives_custom_loss_targets_like_the_data() -> None:
    overrides = ["train.loss=squared_of_a_test", "strategy=ddp", "launch.nproc=2"]
    rank = memory_estimate.estimate(estimate_config([*CHOSEN, *overrides])).ranks[0]
    assert rank.breakdown["parameters"] == 8
