"""verify passes transformers' models with default configurations: with dropout, routers, bf16."""

from __future__ import annotations

from typing import Any

import pytest
from support.configured import run_config
from support.hf_families import FAMILIES
from torch import Tensor

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.problems.errors import plain
from axonlaunch.engines import build
from axonlaunch.engines.precision.policy import keep_parameters_in
from axonlaunch.models.specs.router_loss import RouterLoss
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.result import ParityResult


def verify(kind: str, *overrides: str, **changes: Any) -> ParityResult:
    content = plain({**FAMILIES[kind], **changes}).replace(":", ": ")
    arguments = [
        "model=hf",
        f"model.config={content}",
        "model.init=random",
        "data=synthetic_tokens",
    ]
    batch = ["data.sequence_length=16", "train.global_batch_size=8", "scheduler.warmup_steps=0"]
    return compare.on_mock(
        run_config([*arguments, *batch, "launch.nproc=2", *overrides]), ComparisonPlan(steps=2)
    )


@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPOPTDecoderLayer. returned a view")
@pytest.mark.parametrize(
    ("kind", "overrides", "changes"),
    [
        ("gpt2", ["strategy=ddp"], {"resid_pdrop": 0.1, "attn_pdrop": 0.1}),
        ("opt", ["strategy=fsdp"], {"dropout": 0.1, "attention_dropout": 0.1}),
        (
            "mixtral",
            ["strategy=fsdp", "train.micro_batch_size=2"],
            {"output_router_logits": True},
        ),
        ("qwen3", ["strategy=fsdp", "train.precision=bf16"], {}),
        ("gemma2", ["strategy=ddp", "train.precision=bf16"], {}),
        ("gemma3_text", ["strategy=zero1", "train.precision=fp16"], {}),
        ("phi3", ["strategy=ddp", "model.attention=eager"], {}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_verify_of_hugging_face_models_passes(
    kind: str, overrides: list[str], changes: dict[str, Any]
) -> None:
    verdict = verify(kind, *overrides, **changes)
    assert verdict.failure is None
    assert verdict.passed, verdict.differences


def test_router_loss_that_depends_on_the_micro_batch_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of each rank's own choices, weighted so that equal choices would give the same."""

    class OwnChoices(RouterLoss):
        def share(self, *inputs: Any, **named: Any) -> Tensor:
            return super().share(*inputs, **named) / 2

    monkeypatch.setattr(build, "_router_loss", lambda plan: OwnChoices(lambda counts: None))
    verdict = verify("mixtral", "strategy=ddp", output_router_logits=True, router_aux_loss_coef=1.0)
    assert not verdict.passed


def test_differences_of_compiled_experts_have_a_note_on_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide = compare.decide_verdict

    def decide_as_compiled(config: RunConfig, *others: Any) -> ParityResult:
        return decide(with_values(config, {"train.compile": True}), *others)

    for is_compiled in (False, True):
        monkeypatch.setattr(build, "_router_loss", lambda plan: None)  # a difference
        if is_compiled:
            monkeypatch.setattr(compare, "decide_verdict", decide_as_compiled)
        loss = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
        verdict = verify("mixtral", "strategy=ddp", "train.precision=bf16", **loss)
        assert not verdict.passed
        assert any("compiled routers" in note for note in verdict.notes) == is_compiled


BF16_LORA = [
    *("train.precision=bf16", "train.param_dtype=bf16", "adapter=lora"),
    *("launch.backend=mock", "data.sequence_length=16"),
]
ROUGH: dict[str, Any] = {"hidden_size": 32, "head_dim": 8, "initializer_range": 1.0}
"""A model whose first gradients change by their full size with another rounding to bf16."""


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "changes"), [(4, {}), (8, ROUGH)], ids=["4_layers", "rough"])
def test_an_adapter_on_bf16_weights_is_proved(layers: int, changes: dict[str, Any]) -> None:
    verdict = verify("qwen3", *BF16_LORA, "strategy=zero2", num_hidden_layers=layers, **changes)
    assert verdict.passed, (verdict.reason, verdict.differences)
    assert max(verdict.tolerances[kind] for kind in ("gradient", "parameter", "state")) <= 0.25


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "tensor"])
def test_an_adapter_kept_in_bf16_is_noticed(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found even if rounding ends the comparison of values in the first step."""
    monkeypatch.setattr(
        build,
        "keep_parameters_in",
        lambda model, dtype, *, frozen_only: keep_parameters_in(model, dtype),
    )
    changes = ROUGH if strategy == "tensor" else {}
    layers = 8 if changes else 2
    verdict = verify(
        "qwen3", *BF16_LORA, f"strategy={strategy}", num_hidden_layers=layers, **changes
    )
    assert any("torch.bfloat16, unlike in one process" in d for d in verdict.differences)
