"""A reference in float64 passes correct runs in any precision, and fails wrong ones."""

from __future__ import annotations

import pytest
import torch
from support.configured import run_config
from support.parity_table import MODELS

from axonlaunch.comm.averaging import gradient_bucket
from axonlaunch.config import RunConfig
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.comparison.comparison_config import harder_config
from axonlaunch.verification.locating import locate
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.reference_runs import run_references

PLAN = ComparisonPlan(steps=4, beyond=True, fp64=True)
DDP = ["strategy=ddp", "strategy.ddp.sync=synchronous", "launch.nproc=2"]
FSDP = ["strategy=fsdp", "launch.nproc=2"]


def configured(overrides: list[str]) -> RunConfig:
    """Return a run's configuration as the command does."""
    chosen = [*MODELS["mlp"], "launch.backend=mock", *overrides]
    return harder_config(run_config(chosen), PLAN)


def test_the_reference_computes_in_float64() -> None:
    reference, _ = run_references(configured([*DDP, "train.precision=bf16"]), PLAN)
    tensors = [*reference.end.values(), *reference.steps[0].gradients.values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float64}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "overrides",
    [
        [*DDP],
        [*FSDP, "train.precision=bf16"],
        [*DDP, "train.precision=fp16"],  # its gradients are multiplied by the loss scale
        [*FSDP, "train.precision=bf16", "train.param_dtype=bf16"],
    ],
    ids=" ".join,
)
def test_verify_passes_correct_layouts(overrides: list[str]) -> None:
    config = configured(overrides)
    verdict = compare.on_mock(config, PLAN)
    assert verdict.failure is None
    assert verdict.passed, (verdict.reason, verdict.differences)
    assert "reference in fp64" in verdict.features["precision"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_module_is_named_where_nothing_differs(precision: str) -> None:
    config = configured([*DDP, f"train.precision={precision}"])
    assert locate.locate_difference(config, PLAN) is None


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_fails_a_mean_that_is_two_percent_off(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = gradient_bucket.GradientBucket.finish

    def off(bucket: gradient_bucket.GradientBucket) -> None:
        finish(bucket)
        bucket.data.mul_(0.98)

    monkeypatch.setattr(gradient_bucket.GradientBucket, "finish", off)
    verdict = compare.on_mock(configured([*DDP, f"train.precision={precision}"]), PLAN)
    assert verdict.verdict == "failed"
    assert "gradient of" in verdict.differences[0]
