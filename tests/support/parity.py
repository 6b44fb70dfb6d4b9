"""Trains a configuration on the mock world and tells what it gave, for tests of parity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from configured import run_config
from gathered import Held, gathered, held
from rank_engine import rank_engine
from torch import Tensor

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.data.dataset import IGNORE_INDEX, Batch

STEPS = 2  # the second takes the first update, and the states that it made
# The key projection's bias has a gradient of zero, for softmax ignores it, so what rounding leaves
# is all there is. With AdamW's usual eps of 1e-8 that noise alone would move it by the whole
# learning rate in a random direction.
EPS = ["optimizer.eps=1e-4"]


@dataclass(frozen=True)
class Trained:
    """What a run gave: by step losses, gradient norms and gradients; parameters at its end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


class _Rank(NamedTuple):
    """The same, of gradients and parameters what a rank holds."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Held]]
    parameters: dict[str, Held]


def train(overrides: list[str], ranks: int) -> Trained:
    """Train for some steps on the mock world; every rank must tell the same."""
    chosen = run_config(
        [
            *("train.global_batch_size=8", "train.steps=10", "scheduler.warmup_steps=0"),
            *(f"launch.nproc={ranks}", *overrides),
        ]
        + ([] if "optimizer=sgd" in overrides else EPS)
    )

    def run(world: World) -> _Rank:
        engine, loader = rank_engine(chosen, world)
        losses, norms, gradients = [], [], []
        for step in range(STEPS):
            loss, _ = engine.backward(_unequal(loader.batch(step)))
            gradients.append(held((n, p.grad) for n, p in engine.named_parameters()))
            norm, _ = engine.update()
            losses.append(float(loss))
            norms += [] if norm is None else [float(norm)]
        return _Rank(losses, norms, gradients, held(engine.named_parameters()))

    all_ranks = World.mock(ranks).run(run)
    losses, norms, gradients, parameters = zip(*all_ranks, strict=True)
    assert set(map(tuple, losses)) == {(*losses[0],)}
    assert set(map(tuple, norms)) == {(*norms[0],)}
    by_step = [gathered(of_ranks) for of_ranks in zip(*gradients, strict=True)]
    return Trained(losses[0], norms[0], by_step, gathered(parameters))


def unequal_batches(chosen: RunConfig, *, steps: int) -> list[Batch]:
    """The global batches that ``train`` trains on."""

    def run(world: World) -> list[Batch]:
        _, loader = rank_engine(chosen, world)
        return [_unequal(loader.batch(step)) for step in range(steps)]

    return World.mock(1).run(run)[0]


def _unequal(batch: Batch) -> Batch:
    """Leave targets of some rows out, so that ranks and micro-batches count differently."""
    targets = batch.targets.clone()
    if targets.ndim == 2:
        for row, target in enumerate(targets):
            target[: int(batch.inputs[row, 0]) % 7] = IGNORE_INDEX
    return replace(batch, targets=targets)


def assert_same(
    got: Trained,
    expected: Trained,
    *,
    tolerance: float,
    parameters: float | None = None,
    gradients: float | None = None,
    gradient_steps: int = STEPS,
) -> None:
    """Compare two runs.

    Args:
        got: The one in question.
        expected: One process.
        tolerance: Relative difference of losses that passes.
        parameters: That of the parameters at the end; None: the same.
        gradients: That of gradients and their norms; None: the same.
        gradient_steps: First steps whose gradients are compared. In low precision two runs walk
            apart with the first update.
    """
    for step, (a, b) in enumerate(zip(got.losses, expected.losses, strict=True)):
        assert a == pytest.approx(b, rel=tolerance), f"loss of step {step}"
    norms = [*zip(got.norms, expected.norms, strict=True)]
    for step, (a, b) in enumerate(norms[:gradient_steps]):
        assert a == pytest.approx(b, rel=gradients or tolerance), f"gradient norm of step {step}"
    pairs = [*zip(got.gradients, expected.gradients, strict=True)]
    for step, (a, b) in enumerate(pairs[:gradient_steps]):
        squares = sum(float(gradient.square().sum()) for gradient in b.values())
        usual = (squares / sum(gradient.numel() for gradient in b.values())) ** 0.5
        _assert_near(a, b, gradients or tolerance, floor=usual, what=f"step {step}: gradient")
    # Biases start at 0: what is small beside the weights' initial deviation is no difference.
    end = (got.parameters, expected.parameters)
    _assert_near(*end, parameters or tolerance, floor=0.02, what="parameter")


def _assert_near(
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    *,
    floor: float,
    what: str,
) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.norm().clamp(min=floor * tensor.numel() ** 0.5)
        difference = float((got[name] - tensor).norm() / scale)
        assert difference <= tolerance, f"{what} {name} is off by {difference:.2g}"
