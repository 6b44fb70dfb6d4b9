"""LoRA on built-in models: layouts train the same adapters as one process, and nothing else."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from support.configured import run_config
from support.parity import assert_trains_as_one_process
from support.rank_engine import rank_engine
from torch import nn

from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, to_yaml
from axonlaunch.config.options.adapter import is_of_adapter
from axonlaunch.models.adapters.lora import LoraLayer
from axonlaunch.models.build import build_model, construct
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.models.specs.registry import register_model
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

DATA = [
    *("data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=8"),
    *("train.grad_clip=null", "scheduler=constant", "checkpoint.every=0"),
]
MODELS = {
    "gpt": [
        *("model=gpt", "model.hidden_size=16", "model.num_hidden_layers=4"),
        *("model.num_attention_heads=2", "model.vocab_size=64"),
        "model.max_position_embeddings=16",
    ],
    "llama": [
        *("model=llama_debug", "model.hidden_size=32", "model.num_hidden_layers=4"),
        *("model.num_attention_heads=4", "model.num_key_value_heads=2"),
        *("model.intermediate_size=48", "model.vocab_size=64"),
    ],
}
LORA = {
    "gpt": ["adapter=lora", "adapter.rank=4"],
    "llama": [
        *("adapter=lora", "adapter.rank=3", "adapter.rslora=true", "adapter.dora=true"),
        *("adapter.targets=[q_proj,down_proj]", "train.unfreeze=[norm.*]"),
    ],
}
TENSOR = "strategy=tensor strategy.tensor.sequence_parallel=true"
LAYOUTS = {
    "zero1": (2, "strategy=zero1"),
    "zero2, recomputed": (2, "strategy=zero2 train.activation_checkpointing=full"),
    "hsdp": (
        4,
        "strategy=hsdp strategy.fsdp.replicate=2 train.activation_checkpointing=selective",
    ),
    "offload": (2, "strategy=fsdp strategy.fsdp.cpu_offload=full"),
    "tensor": (2, "strategy=tensor"),
    "sequence": (2, TENSOR),
    "zero bubble": (2, "strategy=pipeline strategy.pipeline.schedule=zbv_zero_bubble"),
    "context": (2, "strategy=fsdp strategy.context.degree=2"),
    "hybrid": (8, "strategy=hybrid strategy.tensor.degree=2 strategy.pipeline.degree=2"),
}
CASES = [
    *(("gpt", layout) for layout in LAYOUTS if layout != "tensor"),
    ("llama", "tensor"),
    ("llama", "sequence"),
    ("llama", "zero bubble"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_layout_trains_the_adapters_that_one_process_trains(model: str, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    chosen = [*MODELS[model], *DATA, *LORA[model], *overrides.split()]
    assert_trains_as_one_process(chosen, ranks)


def test_lora_trains_only_adapters_and_unfrozen_parameters() -> None:
    model = build_model(run_config([*MODELS["llama"], *DATA, *LORA["llama"]]), seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not is_of_adapter(name)} == {"norm.weight"}
    adapted = {name.rpartition(".lora_")[0] for name in trained if is_of_adapter(name)}
    layers = {
        f"layers.{n}.{end}" for n in range(4) for end in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert adapted == layers


class Ended(nn.Module):
    """A model with a head that only its ``ends`` identify."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_lora_targets_exclude_head_unless_named() -> None:
    register_model("ended_of_a_test", layers="layers", ends=(("embed",), ("head",)))(Ended)
    chosen = [*DATA, "model=ended_of_a_test", "adapter=lora", "adapter.rank=2"]
    for more, adapted in ([], {"layers.0", "layers.1"}), (["adapter.targets=[head]"], {"head"}):
        config = run_config([*chosen, *more, "strategy=single", "launch.nproc=1"])
        layers = construct(config, seed=0).named_modules()
        assert {name for name, layer in layers if isinstance(layer, LoraLayer)} == adapted


@pytest.mark.parametrize(
    ("target", "adapted"),
    [
        (r"layers\.\d+\.(self_attn\.q|mlp\.up)_proj", {"layers.0", "layers.1"}),
        (r"layers\.(1)\..*", {"layers.1"}),
        (r"(.*)", {"layers.0", "layers.1"}),
    ],
)
def test_lora_targets_by_regular_expression_of_complete_names(
    target: str, adapted: set[str]
) -> None:
    tiny = ["model.num_hidden_layers=2", f"adapter.targets=['{target}']"]
    chosen = run_config([*MODELS["llama"], *DATA, "adapter=lora", *tiny])
    modules = build_model(chosen, seed=0).named_modules()
    names = [name for name, module in modules if isinstance(module, LoraLayer)]
    assert all(re.fullmatch(target, name) for name in names)
    assert {name.rsplit(".", 2)[0] for name in names} == adapted


def test_lora_starts_like_peft_without_changing_outputs() -> None:
    overrides = [*MODELS["gpt"], *DATA, "strategy=single"]
    adapted = build_model(run_config([*overrides, *LORA["gpt"]]), seed=0)
    plain = build_model(run_config(overrides), seed=0)
    tokens = torch.arange(8)[None]
    assert torch.equal(adapted(tokens), plain(tokens))
    layers = [layer for layer in adapted.modules() if isinstance(layer, LoraLayer)]
    assert len(layers) == 6 * 4
    for layer in layers:
        bound = 1 / math.sqrt(layer.lora_A.in_features)
        assert 0.8 * bound < float(layer.lora_A.weight.detach().abs().max()) <= bound
        assert not bool(layer.lora_B.weight.any())
        assert layer.lora_scale == 16 / 4


def test_rslora_scales_by_root_of_rank() -> None:
    model = construct(run_config([*MODELS["llama"], *DATA, *LORA["llama"]]), seed=0)
    scales = {layer.lora_scale for layer in model.modules() if isinstance(layer, LoraLayer)}
    assert scales == {16 / math.sqrt(3)}


def test_magnitudes_start_as_the_norms_of_the_weights_and_change_no_output() -> None:
    overrides = [*MODELS["gpt"], *DATA, "strategy=single"]
    adapted = build_model(run_config([*overrides, *LORA["gpt"], "adapter.dora=true"]), seed=0)
    plain = build_model(run_config(overrides), seed=0)
    tokens = torch.arange(8)[None]
    assert torch.allclose(adapted(tokens), plain(tokens), atol=1e-5)
    for layer in (part for part in adapted.modules() if isinstance(part, LoraLayer)):
        assert layer.lora_magnitude_vector is not None
        magnitudes = layer.lora_magnitude_vector.weight
        assert torch.allclose(magnitudes, layer.weight.double().norm(dim=1).float())


def test_lora_dropout_applies_to_inputs_of_a_in_training() -> None:
    overrides = [*MODELS["gpt"], *DATA, *LORA["gpt"], "adapter.dropout=0.5", "strategy=single"]
    model = build_model(run_config(overrides), seed=0)
    layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
    nn.init.ones_(layer.lora_B.weight)
    x = torch.ones(2, layer.lora_A.in_features)
    base_output = nn.functional.linear(x, layer.weight, layer.bias)
    torch.manual_seed(0)
    dropped = nn.functional.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(
        layer(x), base_output + layer.lora_B(layer.lora_A(dropped)) * layer.lora_scale
    )
    assert torch.equal(
        layer.eval()(x), base_output + layer.lora_B(layer.lora_A(x)) * layer.lora_scale
    )


def test_dora_dropout_applies_to_inputs_of_weight() -> None:
    more = ["adapter.dora=true", "adapter.dropout=0.5", "strategy=single"]
    model = build_model(run_config([*MODELS["gpt"], *DATA, *LORA["gpt"], *more]), seed=0)
    layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
    assert layer.lora_magnitude_vector is not None
    for parameter in (layer.lora_B.weight, layer.lora_magnitude_vector.weight, layer.bias):
        nn.init.normal_(parameter)
    x = torch.randn(2, layer.lora_A.in_features)
    torch.manual_seed(0)
    dropped = nn.functional.dropout(x, 0.5)
    added = layer.lora_scale * layer.lora_B.weight @ layer.lora_A.weight
    factor = layer.lora_magnitude_vector.weight / (layer.weight + added).norm(dim=1)
    base_output = nn.functional.linear(x, layer.weight, layer.bias)
    expected = (
        base_output + (factor - 1) * (dropped @ layer.weight.t()) + factor * (dropped @ added.t())
    )
    torch.manual_seed(0)
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=hybrid strategy.pipeline.degree=2 launch.nproc=4 adapter.dropout=0.1",
        "strategy=fsdp launch.nproc=2 train.precision=bf16 train.param_dtype=bf16",
        "strategy=tensor adapter.dora=true launch.nproc=2 train.precision=bf16 "
        "train.param_dtype=bf16",
    ],
)
def test_verify_of_lora_passes_and_notes_frozen_parameters(overrides: str) -> None:
    chosen = run_config([*MODELS["gpt"], *DATA, *LORA["gpt"], *overrides.split()])
    verdict = compare.on_mock(chosen, ComparisonPlan(steps=3))
    assert verdict.passed, (verdict.differences, verdict.reason, verdict.failure)
    assert not any(is_of_adapter(name) for name in verdict.frozen_parameters)
    assert verdict.parameters_with_gradient == verdict.parameters - len(verdict.frozen_parameters)


def test_resume_names_the_settings_of_another_adapter(tmp_path: Path) -> None:
    overrides = [*MODELS["llama"], *DATA, "adapter=lora", "strategy=single"]
    chosen = run_config(overrides)
    (tmp_path / "config.yaml").write_text(to_yaml(chosen))

    def save(world: World) -> None:
        saver = Saver(tmp_path, world=world, retention=Retention(newest=1))
        saver.save(rank_engine(chosen, world)[0].state_dict(), step=1, samples=16)
        saver.close()

    World.mock(1).run(save)
    resumed = [*overrides, f"checkpoint.resume={tmp_path}"]
    run_config([*resumed, "adapter.dropout=0.1"])
    for changed, was in (
        ("adapter.alpha=8", "in the scale of adapter.alpha=16.0"),
        ("adapter.rslora=true", "in the scale of adapter.rslora=false"),
        ("adapter.rank=4", "with adapter.rank=8"),
        ("adapter.dora=true", "with adapter.dora=false"),
        ("adapter.targets=[q_proj]", "with adapter.targets=all-linear"),
        ("adapter=null", "with adapter=lora"),
    ):
        with pytest.raises(ConfigError) as refused:
            run_config([*resumed, changed])
        [problem] = str(refused.value).splitlines()
        assert problem.startswith(f"{changed}")
        assert problem.endswith(f"step_1 was trained {was}; use that")


def test_adapters_of_a_model_in_bf16_are_trained_in_fp32() -> None:
    overrides = ["train.precision=bf16", "train.param_dtype=bf16", "strategy=single"]
    chosen = run_config([*MODELS["gpt"], *DATA, *LORA["gpt"], *overrides])

    def dtypes(world: World) -> dict[bool, torch.dtype]:
        engine, _ = rank_engine(chosen, world)
        return {is_of_adapter(name): p.dtype for name, p in engine.named_parameters()}

    assert World.mock(1).run(dtypes) == [{True: torch.float32, False: torch.bfloat16}]


def test_estimate_of_lora_counts_adapter_gradients_and_states() -> None:
    chosen = run_config([*MODELS["gpt"], *DATA, *LORA["gpt"], "strategy=single"])
    shares = TrainingShares.of(chosen)
    named = construct(chosen, seed=0).named_parameters()
    sizes = {name: parameter.numel() for name, parameter in named}
    adapter_bytes = sum(size for name, size in sizes.items() if is_of_adapter(name))
    assert shares.gradients == adapter_bytes / sum(sizes.values())
    assert shares.states == pytest.approx(2 * shares.gradients, rel=0.05)  # and step counts


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("[q_prj]", "matches no linear layer; did you mean"),
        ("[lm_head]", "is the head"),
        ("[embed_tokens]", "adapters are for linear layers"),
        ("[]", "names nothing"),
        ("['(q_proj']", "is not a regular expression: missing ), unterminated subpattern"),
        ("['(q|v)_proj']", "matches no linear layer"),
    ],
)
def test_targets_that_can_not_be_adapted_are_refused(targets: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*MODELS["gpt"], *DATA, "adapter=lora", f"adapter.targets={targets}"])
    [problem] = refused.value.problems
    assert problem.key == "adapter.targets"
    assert message in problem.message
