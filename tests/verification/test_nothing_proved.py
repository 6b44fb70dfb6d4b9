"""A comparison that could not have failed does not pass, and gives the reason."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.configured import run_config
from support.parity_table import MODELS
from torch import Tensor, nn

from axonlaunch.config import with_values
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.result import ParityResult

LAYERS: dict[str, type[nn.Module]] = {}
DDP = ["strategy=ddp", "launch.nproc=2", "strategy.ddp.sync=synchronous"]
OWN = ["model=custom", f"model.target={__name__}:user", "data=digits"]


def verify(overrides: list[str], *, steps: int = 2, **settings: object) -> ParityResult:
    chosen = run_config(["train.global_batch_size=8", "scheduler.warmup_steps=0", *overrides])
    return compare.on_mock(with_values(chosen, settings), ComparisonPlan(steps=steps))


def user() -> nn.Module:
    """Return a model around the layer that a test chooses."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), LAYERS["between"](), nn.Linear(16, 10))


class DeadHead(nn.Module):
    """Outputs that depend on no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1)) * 0.0


def dead() -> nn.Module:
    return DeadHead()


def frozen() -> nn.Module:
    """Return a model with one trainable bias."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Linear(16, 10))
    for parameter in (*model[1].parameters(), model[2].weight):
        parameter.requires_grad_(False)
    return model


def test_a_dead_model_proves_nothing() -> None:
    verdict = verify(["model=custom", f"model.target={__name__}:dead", "data=digits", *DDP])
    assert verdict.verdict == "nothing proved"
    assert not verdict.passed
    assert verdict.reason == (
        "every gradient of one process is zero: the model's loss depends on no parameter"
    )


def test_a_rate_of_zero_proves_nothing() -> None:
    verdict = verify([*MODELS["mlp"], *DDP, "optimizer.lr=0"])
    assert verdict.verdict == "nothing proved"
    assert verdict.reason == (
        "no parameter moved: the learning rate is 0, so no update was compared"
    )
    assert verdict.parameters_moved == 0


def test_comparing_one_rank_with_one_process_proves_nothing() -> None:
    verdict = verify([*MODELS["mlp"], "strategy=single"])
    assert verdict.verdict == "nothing proved"
    assert "one rank was compared with one process" in verdict.reason


def test_frozen_parameters_are_named_as_unproved() -> None:
    verdict = verify(["model=custom", f"model.target={__name__}:frozen", "data=digits", *DDP])
    assert verdict.passed
    assert (verdict.parameters, verdict.parameters_with_gradient) == (4, 1)
    assert verdict.frozen_parameters == ["1.weight", "1.bias", "2.weight"]
    assert verdict.unproved_parameters == []


class ByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.default_rng().uniform(0.9, 1.1))


class ByPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.uniform(0.9, 1.1)


@pytest.mark.parametrize("layer", [ByNumpy, ByPython])
def test_a_model_that_is_random_by_itself_is_reported_as_such(
    layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYERS, "between", layer)
    verdict = verify([*OWN, *DDP])
    assert not verdict.passed
    assert "the model is random: with the same" in str(verdict.failure)


class SignOnly(nn.Module):
    """A loss that is the same for all inputs, but has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()) * 1.0


def constant() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), SignOnly())


def test_a_loss_that_never_changes_proves_nothing() -> None:
    verdict = verify(["model=custom", f"model.target={__name__}:constant", "data=digits", *DDP])
    assert verdict.verdict == "nothing proved"
    assert verdict.reason.startswith("the loss is 2.302585 in every step")
