"""Dropout's masks: alike on a tensor axis, apart between data ranks and steps, recomputed alike."""

from __future__ import annotations

from typing import Any

import pytest
from configured import run_config
from hf_families import without_folder
from parity_table import MODELS

from axonlaunch.engines import activation_checkpointing, mesh_engine
from axonlaunch.verification import compare
from axonlaunch.verification.plan import ComparisonPlan

Patch = pytest.MonkeyPatch
DDP = ["strategy=ddp", "launch.nproc=2"]
TENSOR = ["strategy=tensor", "launch.nproc=2"]
CONTEXT = ["strategy.context.degree=2", "launch.nproc=2"]
RECOMPUTED = [*DDP, "train.activation_checkpointing=full"]


def problems(overrides: list[str]) -> list[str]:
    arguments = MODELS["gpt"]
    if overrides is RECOMPUTED:  # blocks that don't draw save no generator's state
        arguments = without_folder("gpt2", resid_pdrop=0.1)
    chosen = run_config([*arguments, "train.global_batch_size=8", *overrides])
    verdict = compare.on_mock(chosen, ComparisonPlan(steps=2))
    assert verdict.failure is None
    return verdict.differences


def seeds(patch: Patch, seed: Any) -> None:
    import torch

    def draw(engine: Any) -> None:
        torch.manual_seed(seed(engine))

    patch.setattr(mesh_engine.MeshEngine, "_seed_draws", draw)


def every_rank_draws_the_same(patch: Patch) -> None:
    seeds(patch, lambda engine: engine.step)


def every_step_draws_the_same(patch: Patch) -> None:
    seeds(patch, lambda engine: engine._world.rank)


def tensor_ranks_draw_different_numbers(patch: Patch) -> None:
    seeds(patch, lambda engine: 7 * engine.step + engine._world.rank)


def recomputation_draws_anew(patch: Patch) -> None:
    right = activation_checkpointing.checkpoint

    def without_state(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "preserve_rng_state": False})

    patch.setattr(activation_checkpointing, "checkpoint", without_state)


@pytest.mark.parametrize("overrides", [DDP, TENSOR, CONTEXT, RECOMPUTED], ids=" ".join)
def test_it_passes_what_draws_as_it_should(overrides: list[str]) -> None:
    assert problems(overrides) == []


@pytest.mark.parametrize(
    ("fault", "overrides", "reported"),
    [
        (every_rank_draws_the_same, DDP, "data ranks 0 and 1 draw the same random numbers"),
        (every_rank_draws_the_same, CONTEXT, "of a context axis draw the same random numbers"),
        (every_step_draws_the_same, DDP, "the same random numbers in layers.0"),
        (tensor_ranks_draw_different_numbers, TENSOR, "of a tensor axis draw different"),
        (recomputation_draws_anew, RECOMPUTED, "recomputing "),
    ],
)
def test_it_reports_masks_that_would_be_wrong(
    fault: Any, overrides: list[str], reported: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert any(reported in line for line in problems(overrides))
