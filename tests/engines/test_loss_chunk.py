"""A chunked loss equals the unchunked loss, and so do its gradients, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configured import estimate_config, run_config
from support.hf_families import without_folder
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from axonlaunch.comm import World
from axonlaunch.config import ConfigError, with_values
from axonlaunch.data import build_dataset
from axonlaunch.models.build import build_model
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.preflight.model_outputs import head_problems
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

CHUNK = "train.loss_chunk=5"  # divides neither a sample's 16 tokens nor a micro-batch's
DATA = ["data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=8"]
GPT = ["model=gpt", "model.num_hidden_layers=4", "model.hidden_size=32", *DATA]
TENSOR = ["strategy=tensor", "launch.nproc=2"]
CAPPED = {"final_logit_softcapping": 0.1}
"""Low enough to change the logits of random weights."""
ZERO_BUBBLE = [
    *("strategy=pipeline", "launch.nproc=2"),
    "strategy.pipeline.schedule=zbv_zero_bubble",
]


@pytest.mark.parametrize(
    "overrides",
    [GPT, [*without_folder("gemma2", **CAPPED), "data.sequence_length=16"]],
    ids=["gpt", "gemma2"],
)
def test_chunked_loss_equals_torch_cross_entropy(overrides: list[str]) -> None:
    chosen = run_config([*overrides, CHUNK, "strategy=single"])
    model = build_model(chosen.model, seed=0)

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        batch = loader.batch(0)
        loss, _ = engine.backward(batch)
        expected = cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
        wanted = dict(model.named_parameters())
        for name, parameter in engine.named_parameters():
            assert parameter.grad is not None
            gradient = wanted[name].grad
            assert gradient is not None
            # Softmax ignores the bias of keys, so its gradient is only rounding.
            floor = 1.0 if name.endswith("k_proj.bias") else 0.0
            distance = (parameter.grad - gradient).norm() / (gradient.norm() + floor)
            assert distance < 1e-6, name

    World.mock(1).run(run)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=ddp", "launch.nproc=2", "train.micro_batch_size=2"],
        ["strategy=fsdp", "launch.nproc=2", "train.micro_batch_size=2"],
        [*TENSOR, "strategy.tensor.sequence_parallel=true"],
        ZERO_BUBBLE,
        ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2"],
        ["strategy=hybrid", "launch.nproc=8"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_chunked_loss_in_every_layout_equals_unchunked_loss(layout: list[str]) -> None:
    verdict = compare.on_mock(run_config([*GPT, CHUNK, *layout]), ComparisonPlan(steps=2))
    assert verdict.failure is None
    assert verdict.passed, verdict.differences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("qwen3", TENSOR, {}),
        ("gpt2", ZERO_BUBBLE, {"num_hidden_layers": 4}),
        ("gemma2", TENSOR, CAPPED),
        ("gemma2", ZERO_BUBBLE, {**CAPPED, "num_hidden_layers": 4}),
        ("gemma2", ["strategy=fsdp", "launch.nproc=2", "train.precision=bf16"], CAPPED),
        ("mixtral", ["strategy=fsdp", "launch.nproc=2"], {"output_router_logits": True}),
    ],
)
def test_chunked_loss_of_transformers_models_equals_unchunked_loss(
    kind: str, layout: list[str], changes: dict[str, Any]
) -> None:
    batch = ["train.global_batch_size=8", "train.micro_batch_size=2"]
    verdict = compare.on_mock(
        run_config(without_folder(kind, CHUNK, *batch, *layout, **changes)), ComparisonPlan(steps=2)
    )
    assert verdict.failure is None
    assert verdict.passed, verdict.differences


@pytest.mark.slow
def test_bf16_computes_each_chunk_in_bf16() -> None:
    overrides = ["strategy=ddp", "launch.nproc=2", "train.precision=bf16"]
    verdict = compare.on_mock(run_config([*GPT, CHUNK, *overrides]), ComparisonPlan(steps=2))
    assert verdict.passed, verdict.differences


def test_predictions_with_chunked_loss_are_logits() -> None:
    chosen = run_config([*GPT, CHUNK, "strategy=single"])

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        batch = loader.batch(0)
        expected = build_model(chosen.model, seed=0)(batch.inputs)
        torch.testing.assert_close(engine.predict(batch.inputs), expected)
        assert torch.isfinite(engine.evaluate(batch)).all()

    World.mock(1).run(run)


@pytest.mark.slow
def test_estimate_counts_logits_of_one_chunk() -> None:
    """The vocabulary is large enough that the peak is at the loss: three fp32 numbers per logit."""
    large = ["model.vocab_size=4096", "data.vocab_size=4096", "data.sequence_length=128"]
    overrides = [*GPT, *large, "model.num_hidden_layers=1", "strategy=ddp", "launch.nproc=2"]

    def peak(chunk: int | str) -> int:
        chosen = estimate_config([*overrides, f"train.loss_chunk={chunk}", "hardware=cpu"])
        return int(estimate(chosen).peak_bytes)

    of_a_token = 4096 * 4
    assert (peak(256) - peak(128)) / 128 == pytest.approx(3 * of_a_token, rel=0.02)
    tokens = 4 * 128
    assert peak("null") - peak(128) > 2.8 * (tokens - 128) * of_a_token


class _Sorts(nn.Module):
    """Needs all of its logits at once, after the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits.sort(-1).values


def test_chunked_loss_with_full_logits_use_is_refused() -> None:
    spec = ModelSpec(build=lambda config: _Sorts(), loss=cross_entropy_sum, head="head")
    chosen = with_values(run_config([*GPT, "strategy=single"]), {"train.loss_chunk": 16})
    dataset = build_dataset(chosen.data)
    with torch.device("meta"):
        model = _Sorts()
    [problem] = head_problems(model, spec, dataset, train=chosen.train)
    assert (
        problem.message
        == "the model uses its logits in sort after head, which needs all of them; use null"
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["model=vit", "data=synthetic_images"],
            "the module that computes the model's logits",
        ),
    ],
)
def test_chunked_loss_without_linear_head_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        run_config([*overrides, "train.loss_chunk=16", "strategy=single"])
    assert "train.loss_chunk=16: " in str(refused.value)
