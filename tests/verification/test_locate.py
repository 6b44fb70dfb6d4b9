"""The first difference is named: the module in order of computation, the ranks, the factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.parity_table import MODELS
from torch import nn

import axonlaunch as ax
from axonlaunch.comm.averaging import gradient_bucket
from axonlaunch.engines.tensor.parallel_layers import layers
from axonlaunch.verification.locating import locate
from axonlaunch.verification.locating.recorded_steps import RecordedSteps
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

Patch = pytest.MonkeyPatch
TENSOR = ["strategy=tensor", "launch.nproc=2"]
DDP = ["strategy=ddp", "strategy.ddp.sync=synchronous", "launch.nproc=2"]


def first(overrides: list[str]) -> locate.FirstDifference | None:
    chosen = [*MODELS["gpt"], "train.global_batch_size=8", *overrides]
    return locate.locate_difference(run_config(chosen), ComparisonPlan(steps=2))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "overrides",
    [
        [*TENSOR, "strategy.tensor.sequence_parallel=true"],
        [*TENSOR, "adapter=lora"],
        ["strategy=fsdp", "launch.nproc=2", "train.precision=bf16"],
        ["strategy=pipeline", "launch.nproc=2"],
        ["strategy.context.degree=2", "launch.nproc=2"],
        [*DDP, "data.document_length=5", "train.micro_batch_size=2"],  # same positions
    ],
    ids=" ".join,
)
def test_nothing_is_named_where_nothing_differs(overrides: list[str]) -> None:
    assert first(overrides) is None


def one_rank_doubles(patch: Patch) -> None:
    right = layers.RowParallelLinear.forward

    def doubled(layer: Any, x: torch.Tensor) -> torch.Tensor:
        y = right(layer, x)
        return 2 * y if layer.axis.group.rank == 1 else y

    patch.setattr(layers.RowParallelLinear, "forward", doubled)


def gradients_are_summed_not_averaged(patch: Patch) -> None:
    finish = gradient_bucket.GradientBucket.finish

    def summed(bucket: Any) -> None:
        finish(bucket)
        bucket.data.mul_(2)

    patch.setattr(gradient_bucket.GradientBucket, "finish", summed)


def part_of_rank_0(part: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """Return a fault: part of the output of rank 1's column-parallel layers comes from rank 0."""
    right = layers.ColumnParallelLinear.forward

    def exchanged(layer: Any, x: torch.Tensor) -> torch.Tensor:
        y = right(layer, x)
        group = layer.axis.group
        first = ax.broadcast(y.detach().clone(), group=group)
        if group.rank == 1:
            part(y.data).copy_(part(first))
        return y

    return lambda patch: patch.setattr(layers.ColumnParallelLinear, "forward", exchanged)


def half_is_doubled(patch: Patch) -> None:
    right = layers.RowParallelLinear.forward

    def doubled(layer: Any, x: torch.Tensor) -> torch.Tensor:
        y = right(layer, x)
        y.data[:, : y.shape[1] // 2] *= 2
        return y

    patch.setattr(layers.RowParallelLinear, "forward", doubled)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("fault", "overrides", "said"),
    [
        (
            part_of_rank_0(lambda y: y),
            TENSOR,
            "layers.0.self_attn.q_proj: its output is off by 1.4 of its size: it is rank 0's on "
            "rank 1 (tp 1)",
        ),
        (
            part_of_rank_0(lambda y: y[:, y.shape[1] // 2 :]),
            TENSOR,
            "layers.0.self_attn.q_proj: its output is off by 0.95 of its size: the second half of "
            "dim 1 is rank 0's on rank 1 (tp 1)",
        ),
        (
            half_is_doubled,
            TENSOR,
            "layers.0.self_attn.o_proj: its output is off by 0.78 of its size, all of it in the "
            "first half of dim 1 on every rank that computes it",
        ),
        (
            one_rank_doubles,
            TENSOR,
            "layers.0.self_attn.o_proj: its output is 2.00 times what it should be, as if summed "
            "once too often over tp on rank 1 (tp 1)",
        ),
        (
            gradients_are_summed_not_averaged,
            DDP,
            "norm: the gradient of norm.weight is 2.00 times what it should be, as if summed once "
            "too often over dp_replicate on every rank that computes it",
        ),
    ],
)
def test_first_difference_is_named_with_ranks_and_factor(
    fault: Any, overrides: list[str], said: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert str(first(overrides)) == said


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.1), nn.Linear(16, 10))


def test_outputs_of_a_model_with_dropout_are_compared_in_each_step() -> None:
    chosen = ["model=custom", f"model.target={__name__}:dropping", "data=digits", *DDP]
    recorded = RecordedSteps(run_config([*chosen, "train.global_batch_size=8"]))
    compared = [(q.step, q.name) for q in recorded.quantities() if q.kind == "output" and q.pairs]
    assert {(step, name) for step in (1, 2) for name in ("1", "2", "3")} <= {*compared}
