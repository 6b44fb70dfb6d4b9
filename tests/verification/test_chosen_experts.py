"""Routers whose choice differs between a layout and one process, by rounding or by a bug."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import ROUTED, without_folder
from support.moe_layouts import SETTINGS as SETTINGS_OF_MOE
from torch import Tensor

from axonlaunch.engines.expert.kept_choices import _TakeChoices
from axonlaunch.models.build import build_model, spec_for
from axonlaunch.verification.comparison import verdict
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.decisions.chosen_experts import ChoicesInBackward
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.tolerances import Tolerances
from axonlaunch.verification.result import ParityResult

LAYOUT = ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=2"]
SETTINGS = ["train.global_batch_size=4", "train.steps=10", "optimizer.lr=3e-3"]


def compare(*more: str) -> ParityResult:
    overrides = without_folder("qwen3_moe", *SETTINGS, *LAYOUT, *more)
    return on_mock(run_config(overrides), ComparisonPlan(steps=2))


def shift_scores_of_ranks(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Give experts 0 and 1 equal scores, except for a shift with opposite signs in the layout and
    in one process.
    """
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    linear = torch.nn.functional.linear

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = linear(hidden, self.weight)
        sign = 1 if threading.current_thread() is threading.main_thread() else -1
        scores = torch.cat([scores[:, :1], scores[:, :1] + sign * size, scores[:, 2:]], dim=1)
        values, experts = torch.topk(scores.softmax(-1), self.top_k)
        return scores, values / values.sum(-1, keepdim=True), experts

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", forward)


@pytest.mark.slow
def test_token_that_rounding_sends_to_other_experts_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shift_scores_of_ranks(monkeypatch, 1e-7)
    result = compare()
    assert result.passed, result.differences
    [note] = [note for note in result.notes if "other experts" in note]
    assert note.startswith("rounding sends ")
    assert note.endswith("everything else was compared with equal choices")
    assert result.max_gradient_difference < 1e-5


def test_other_experts_of_clearly_different_scores_are_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shift_scores_of_ranks(monkeypatch, 1e-2)
    result = compare()
    assert not result.passed
    assert " go to other experts; scores differ by 0.0" in result.differences[0]


def test_recomputation_that_chooses_experts_again_is_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoSteps(Tolerances):
        def __init__(self, *inputs: Any) -> None:
            super().__init__(*inputs)
            self.last_step = 0

    monkeypatch.setattr(_TakeChoices, "choose", lambda _, __, make: make())
    # Also if rounding changes even the first step too much for other comparisons.
    monkeypatch.setattr(verdict, "Tolerances", NoSteps)
    result = compare("train.activation_checkpointing=full")
    assert "choose the experts of" in result.differences[0]


@pytest.mark.parametrize(("dim", "tokens"), [(0, 0), (1, 6), (-1, 6)])
def test_experts_are_chosen_in_the_last_dimension_of_scores(dim: int, tokens: int) -> None:
    scores = torch.ones(6, 4, requires_grad=True)
    scores.register_hook(lambda gradient: gradient.topk(1, dim=dim) and None)
    with ChoicesInBackward(num_experts=4) as again:
        scores.square().sum().backward()
    assert again.tokens == tokens


@pytest.mark.parametrize(
    "chosen",
    [
        [*SETTINGS_OF_MOE, "model.router_aux_loss=false"],
        without_folder("gpt_oss", **ROUTED["gpt_oss"]),
    ],
)
def test_plain_experts_compute_what_grouped_products_compute(chosen: list[str]) -> None:
    config = run_config([*chosen, "strategy=single"])
    tokens = torch.arange(32).view(2, 16)
    results = []
    for is_plain in (False, True):
        model = build_model(config, seed=0)
        if is_plain:
            spec_for(config).use_plain_experts(model)
        outputs = model(tokens)
        outputs.square().mean().backward()
        results.append([outputs, *(parameter.grad for parameter in model.parameters())])
    for plain, grouped in zip(*results, strict=True):
        torch.testing.assert_close(plain, grouped, rtol=1e-4, atol=1e-6)
