"""Dropout masks: equal on a tensor axis, different between data ranks and steps, and reproduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import without_folder
from support.parity_table import MODELS, TOKENS
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.engines import forward_backward, mesh_engine
from axonlaunch.engines.recomputation import activation_checkpointing
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.result import ParityResult

Patch = pytest.MonkeyPatch
DDP = ["strategy=ddp", "launch.nproc=2"]
TENSOR = ["strategy=tensor", "launch.nproc=2"]
PIPELINE = ["strategy=pipeline", "launch.nproc=2"]
CONTEXT = ["strategy.context.degree=2", "launch.nproc=2"]
RECOMPUTED = [*DDP, "train.activation_checkpointing=full"]


def verdict_on(arguments: list[str], overrides: list[str]) -> ParityResult:
    chosen = run_config([*arguments, "train.global_batch_size=8", *overrides])
    verdict = compare.on_mock(chosen, ComparisonPlan(steps=2))
    assert verdict.failure is None
    return verdict


def problems(overrides: list[str]) -> list[str]:
    arguments = MODELS["gpt"]
    if overrides is RECOMPUTED:  # blocks without dropout save no generator state
        arguments = without_folder("gpt2", resid_pdrop=0.1)
    return verdict_on(arguments, overrides).differences


def seeds(patch: Patch, seed: Any) -> None:
    def draw(engine: Any) -> None:
        torch.manual_seed(seed(engine))

    patch.setattr(mesh_engine.MeshEngine, "_seed_draws", draw)


def every_rank_draws_the_same(patch: Patch) -> None:
    seeds(patch, lambda engine: engine.step)


def every_step_draws_the_same(patch: Patch) -> None:
    seeds(patch, lambda engine: engine._parts.world.rank)


def a_rank_draws_what_another_drew_before(patch: Patch) -> None:
    seeds(patch, lambda engine: engine.step + engine._parts.world.rank)


def tensor_ranks_draw_different_numbers(patch: Patch) -> None:
    seeds(patch, lambda engine: 7 * engine.step + engine._parts.world.rank)


def recomputation_draws_again(patch: Patch) -> None:
    right = activation_checkpointing.checkpoint

    def without_state(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "preserve_rng_state": False})

    patch.setattr(activation_checkpointing, "checkpoint", without_state)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("overrides", [DDP, TENSOR, RECOMPUTED, CONTEXT], ids=" ".join)
def test_verify_passes_correct_random_draws(overrides: list[str]) -> None:
    assert problems(overrides) == []


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("fault", "overrides", "reported"),
    [
        (every_rank_draws_the_same, DDP, "data ranks 0 and 1 draw the same random numbers"),
        (every_rank_draws_the_same, CONTEXT, "of a context axis draw the same random numbers"),
        (
            every_rank_draws_the_same,
            PIPELINE,
            "0 and 1 of a pipeline draw the same random numbers",
        ),
        (every_step_draws_the_same, DDP, "the same random numbers in layers.0"),
        (
            a_rank_draws_what_another_drew_before,
            DDP,
            "as rank 1 in step 1: dropout would repeat",
        ),
        (tensor_ranks_draw_different_numbers, TENSOR, "of a tensor axis draw different"),
        (recomputation_draws_again, RECOMPUTED, "recomputing "),
    ],
)
def test_it_reports_masks_that_would_be_wrong(
    fault: Any, overrides: list[str], reported: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert any(reported in line for line in problems(overrides))


class Dropping(nn.Module):
    """Applies dropout by a module and by a function, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(64, 16), nn.Dropout(0.2)
        self.inner, self.head = Attending(), nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(self.dropout(self.embed(tokens))))
        return logits


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.2

    def forward(self, x: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=rate)


@pytest.fixture
def _registered() -> None:
    ax.register_model("masked", inputs="tokens")(Dropping)


OWN = ["model=masked", *TOKENS]


def every_micro_batch_draws_the_same(patch: Patch) -> None:
    right = forward_backward.LocalForwardBackward._loss

    def seeded(self: Any, batch: Any, loss: Any) -> Tensor:
        torch.manual_seed(torch.initial_seed())
        return right(self, batch, loss)

    patch.setattr(forward_backward.LocalForwardBackward, "_loss", seeded)


@pytest.mark.usefixtures("_registered")
def test_the_masks_of_a_model_with_dropout_are_compared() -> None:
    verdict = verdict_on(OWN, [*DDP, "train.micro_batch_size=2"])
    assert verdict.passed
    # 2 steps, 2 ranks, 2 micro-batches, 2 masks each
    assert verdict.notes == [
        "dropout (up to 0.2) was off where numbers were compared; 16 masks were compared with it on"
    ]


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        (every_rank_draws_the_same, "data ranks 0 and 1 draw the same random numbers in dropout"),
        (every_step_draws_the_same, "the same random numbers in inner as rank 0 in step 1"),
        (every_micro_batch_draws_the_same, "in inner for two micro-batches"),
    ],
)
def test_it_reports_masks_that_are_wrong(fault: Any, reported: str, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    lines = verdict_on(OWN, [*DDP, "train.micro_batch_size=2"]).differences
    assert any(reported in line for line in lines), lines
