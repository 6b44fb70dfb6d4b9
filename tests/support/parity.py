"""Trains a configuration on the mock world and tells what it gave, for tests of parity."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from configured import run_config
from rank_engine import rank_engine
from torch import Tensor

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.data.dataset import IGNORE_INDEX, Batch
from axonlaunch.models.dtensor_regions import whole

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


def train(overrides: list[str], ranks: int) -> Trained:
    """Train for some steps on the mock world; every rank must tell the same."""
    chosen = run_config(
        [
            *("train.global_batch_size=8", "train.steps=10", "scheduler.warmup_steps=0"),
            *(f"launch.nproc={ranks}", *overrides),
        ]
        + ([] if "optimizer=sgd" in overrides else EPS)
    )

    def run(world: World) -> Trained:
        engine, loader = rank_engine(chosen, world)
        losses, norms, gradients = [], [], []
        for step in range(STEPS):
            loss, _ = engine.backward(_unequal(loader.batch(step)))
            named = engine.named_parameters()
            gradients.append({n: whole(p.grad).clone() for n, p in named if p.grad is not None})
            norm, _ = engine.update()
            losses.append(float(loss))
            norms += [] if norm is None else [float(norm)]
        parameters = {n: whole(p.detach()).clone() for n, p in engine.named_parameters()}
        return Trained(losses, norms, gradients, parameters)

    first, *others = World.mock(ranks).run(run)
    for other in others:
        assert other.losses == first.losses
        assert other.norms == first.norms
        # Pipeline stages hold different parameters; what two ranks hold must be the same.
        pairs = [*zip(first.gradients, other.gradients, strict=True)]
        for mine, theirs in [*pairs, (first.parameters, other.parameters)]:
            for name, tensor in theirs.items():
                assert torch.equal(mine.setdefault(name, tensor), tensor), f"ranks differ on {name}"
    return first


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
