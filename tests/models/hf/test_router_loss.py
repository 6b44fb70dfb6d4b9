"""The auxiliary loss of routers: that of the global batch, without padding, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import save, without_folder
from support.hf_loops import SETTINGS, adamw, batches, by_axonlaunch
from support.rank_engine import rank_engine
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.models.build import spec_for
from axonlaunch.models.hf.architecture import architecture
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

WEIGHT = 0.5
SINGLE = ["strategy=single", "launch.nproc=1"]
MICRO = "train.micro_batch_size=1"
EXPERT = ["strategy.expert.degree=2", "launch.nproc=4", MICRO]
LAYOUTS = {
    "micro-batches": [*SINGLE, MICRO],
    "fsdp": ["strategy=fsdp", "launch.nproc=2"],
    "tensor": ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2", MICRO],
    "ddp": ["strategy=ddp", "launch.nproc=2", MICRO],
    "zero1": ["strategy=zero1", "launch.nproc=2", MICRO],
    "context": ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2", MICRO],
    "experts": ["strategy=fsdp", "strategy.tensor.degree=2", *EXPERT],
    "hsdp": ["strategy=hsdp", *EXPERT],
    "1f1b": ["strategy=fsdp", "strategy.pipeline.degree=2", *EXPERT],
    "zbv": [
        *("strategy=pipeline", "launch.nproc=2", MICRO),
        "strategy.pipeline.schedule=zbv_zero_bubble",
    ],
    "recomputation": [
        *("strategy=fsdp", "launch.nproc=2", MICRO),
        "train.activation_checkpointing=full",
    ],
}
FAST = ("micro-batches", "fsdp", "tensor")


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return overrides for rows that are padded."""
    folder = tmp_path_factory.mktemp("rows")
    lines = [json.dumps({"text": f"{number} " * (1 + number % 9)}) for number in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    chosen = ["data=documents", f"data.files=[{folder}/rows.jsonl]", "data.packing=none"]
    chosen += ["tokenizer.name=bytes", f"data.cache_dir={folder}/cache", "data.too_long=truncate"]
    return [*chosen, "data.sequence_length=32"]


def plain_losses(path: Path, overrides: list[str]) -> list[float]:
    """Train with transformers' model and function on whole batches, with an attention mask."""
    import transformers

    chosen = run_config([*SETTINGS, f"model.path={path}", *SINGLE, *overrides])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = adamw(model.train())
    losses = []
    for batch in batches(chosen):
        mask, targets = batch.present, batch.targets.flatten()
        assert mask is not None
        optimizer.zero_grad()
        outputs = model(input_ids=batch.inputs, attention_mask=mask, output_router_logits=True)
        auxiliary = load_balancing_loss_func(
            outputs.router_logits, model.num_experts, model.num_experts_per_tok, mask
        )
        loss = cross_entropy(outputs.logits.flatten(0, 1), targets) + WEIGHT * auxiliary
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_router_loss_is_that_of_the_global_batch_without_padding(
    kind: str, padded: list[str], tmp_path: Path
) -> None:
    save(kind, tmp_path, router_aux_loss_coef=WEIGHT, num_hidden_layers=4)
    expected = plain_losses(tmp_path, padded)
    for name in FAST if kind == "mixtral" else LAYOUTS:
        losses = by_axonlaunch(tmp_path, LAYOUTS[name], *padded)
        assert losses == pytest.approx(expected, rel=1e-5), name
    without = by_axonlaunch(tmp_path, SINGLE, *padded, "model.router_aux_loss=0")
    assert without[0] < expected[0] - 0.1


@pytest.mark.slow
def test_pipeline_stage_without_routers_takes_part_in_their_loss(
    padded: list[str], tmp_path: Path
) -> None:
    dense = {"num_hidden_layers": 4, "mlp_only_layers": [0, 1]}
    save("qwen3_moe", tmp_path, router_aux_loss_coef=WEIGHT, **dense)
    expected = plain_losses(tmp_path, padded)
    pipeline = ["strategy=pipeline", "launch.nproc=2", "strategy.pipeline.split=[2,2]", MICRO]
    assert by_axonlaunch(tmp_path, pipeline, *padded) == pytest.approx(expected, rel=1e-5)


@ax.register_loss("entropy_of_a_router_test")
def entropy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    targets = batch["targets"].flatten()
    return cross_entropy(outputs.flatten(0, 1), targets, reduction="sum")


@ax.register_loss("contrast_of_a_router_test")
def contrast(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss of each sample that depends on the others of its micro-batch."""
    return entropy(outputs - outputs.mean(0), batch)


def test_router_loss_is_added_to_a_custom_loss(padded: list[str], tmp_path: Path) -> None:
    save("mixtral", tmp_path, router_aux_loss_coef=WEIGHT)
    expected = plain_losses(tmp_path, padded)
    custom = [*padded, "train.loss=entropy_of_a_router_test"]
    losses = by_axonlaunch(tmp_path, LAYOUTS["micro-batches"], *custom)
    assert losses == pytest.approx(expected, rel=1e-5)
    for loss in ("entropy", "contrast"):
        named = [*padded, f"train.loss={loss}_of_a_router_test", "train.micro_batch_size=2"]
        compared = run_config([*SETTINGS, f"model.path={tmp_path}", *LAYOUTS["fsdp"], *named])
        result = on_mock(compared, ComparisonPlan(steps=2))
        assert result.passed, result.differences


def test_evaluation_leaves_the_router_loss_out(padded: list[str], tmp_path: Path) -> None:
    save("mixtral", tmp_path, router_aux_loss_coef=WEIGHT)
    losses = []
    for weight in ("0.5", "0"):
        overrides = [*SETTINGS, *padded, *SINGLE, f"model.path={tmp_path}"]
        chosen = run_config([*overrides, f"model.router_aux_loss={weight}"])

        def evaluate(world: World, chosen: Any = chosen) -> list[float]:
            engine, loader = rank_engine(chosen, world)
            sums: list[float] = engine.evaluate(loader.batch(0)).tolist()
            return sums

        losses.append(World.mock(1).run(evaluate)[0])
    assert losses[0] == losses[1]


def typed(kind: str, *overrides: str, **changes: Any) -> Any:
    config = run_config(
        [*without_folder(kind, "strategy=single", "launch.nproc=1", **changes), *overrides]
    )
    return architecture(config.model), spec_for(config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "changes", "weight"),
    [
        ([], {"router_aux_loss_coef": 0.25}, 0.25),
        ([], {"router_aux_loss_coef": 0.0}, None),
        ([], {"router_aux_loss_coef": 0.25, "output_router_logits": False}, None),
        (["model.router_aux_loss=false"], {"router_aux_loss_coef": 0.25}, None),
        (["model.router_aux_loss=0.125"], {"router_aux_loss_coef": 0.25}, 0.125),
        (["model.router_aux_loss=0.125"], {"router_aux_loss_coef": 0.0}, 0.125),
    ],
)
def test_router_loss_has_the_configured_weight(
    overrides: list[str], changes: dict[str, Any], weight: float | None
) -> None:
    config, spec = typed("mixtral", *overrides, **changes)
    assert config.output_router_logits == (weight is not None)
    assert spec.mixes_samples == ("none" if weight is None else "batch")
    if weight is not None:
        assert config.router_aux_loss_coef == weight


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("gpt2", ["model.router_aux_loss=0.1"], "has no routers with an auxiliary loss; use null"),
        ("mixtral", ["model.router_aux_loss=true"], "names no weight; use null"),
        (
            "mixtral",
            ["model.router_aux_loss=0.1", "model.config.output_router_logits=false"],
            r"output_router_logits=false: contradicts model\.router_aux_loss=0\.1",
        ),
    ],
)
def test_a_router_loss_that_is_impossible_is_refused(
    kind: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config([*without_folder(kind), "launch.nproc=1", *overrides])
