"""``scripts/test --sweep`` counts the verified combinations, and fails if one fails."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from axonlaunch.config import RunConfig
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.result import ParityResult, failed_result

ONE = "ddp-2-mlp-fp32-1-full"
sweep = runpy.run_path(str(Path(__file__).with_name("sweep.py")))["main"]


@pytest.mark.slow
def test_passing_verify_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16, with six elements of a bias on a rank: rounding increases its norm by 6 %."""
    combination = "fsdp,_offload_full_x_tensor-4-mlp-bf16-1-none"
    assert sweep(["--only", combination]) == 0
    assert f"{combination}: passed" in capsys.readouterr().out


def test_a_combination_that_fails_is_an_alarm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: RunConfig, plan: ComparisonPlan) -> ParityResult:
        return failed_result(config, plan.steps, "rank 1 failed")

    monkeypatch.setattr(compare, "on_mock", fail)
    assert sweep(["--only", ONE, "--draw", "1"]) == 1
    assert f"alarm: {ONE}: failed: rank 1 failed" in capsys.readouterr().out
