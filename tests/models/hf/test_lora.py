"""LoRA on models of transformers: every layout equals peft, transformers and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.gathered import Held, gathered, held
from support.hf_families import save, without_folder
from support.hf_loops import SETTINGS, STEPS, batches
from support.rank_engine import rank_engine
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.options.adapter import is_of_adapter

# peft 0.21 calls it, but it is deprecated in transformers 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LORA = ["adapter=lora", "adapter.rank=4", "adapter.alpha=6", "train.global_batch_size=8"]
SHARED = "tensor 4, of 2 heads of keys"
LAYOUTS = {
    "single": ["strategy=single"],
    "ddp 2": ["strategy=ddp", "launch.nproc=2"],
    "fsdp 2": ["strategy=fsdp", "launch.nproc=2"],
    "zero1 2": ["strategy=zero1", "launch.nproc=2"],
    "tensor 2": ["strategy=tensor", "launch.nproc=2"],
    SHARED: [*("strategy=tensor", "launch.nproc=4", "strategy.tensor.degree=4")],
    "pipeline 2": ["strategy=pipeline", "launch.nproc=2"],
    "hybrid 4": ["strategy=hybrid", "launch.nproc=4", "strategy.pipeline.degree=2"],
}
_EXPERT = ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=4"]
DIVIDED_EXPERTS = {
    "expert 2 x 2": _EXPERT,
    "expert 2, tensor 2": [*_EXPERT, "strategy.tensor.degree=2"],
    "expert 2, pipeline 2": [*_EXPERT, "strategy.pipeline.degree=2"],
}
EXPRESSION = r"model\.layers\.(1\.self_attn\.(q|v)|\d+\.mlp\.(up|down))_proj"
"""Regular expression of names of layers; as a text, it is one for PEFT."""
CASES = [
    *(("qwen3", layout, "all-linear") for layout in LAYOUTS if layout not in ("zero1 2", SHARED)),
    ("gpt2", "fsdp 2", ["c_attn", "c_proj"]),
    # These always have magnitudes, which are scaled in the same way.
    ("gpt2", "tensor 2", "all-linear"),
    ("qwen3", SHARED, "all-linear"),
    # Its fused layers gather their outputs.
    ("phi3", "tensor 2", "all-linear"),
    *(("qwen3", layout, EXPRESSION) for layout in ("single", "tensor 2")),
]
WITH_MAGNITUDES = [
    ("gpt2", "tensor 2"),
    ("gpt2", "fsdp 2"),
    *(("qwen3", layout) for layout in LAYOUTS),
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("kind", "layout", "targets"), CASES)
def test_lora_losses_and_gradients_equal_peft(
    kind: str, layout: str, targets: Any, tmp_path: Path
) -> None:
    named = f"'{targets}'" if isinstance(targets, str) else f"[{','.join(targets)}]"
    compared(kind, layout, tmp_path, f"adapter.targets={named}", target_modules=targets)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), WITH_MAGNITUDES)
def test_dora_losses_and_gradients_equal_peft(kind: str, layout: str, tmp_path: Path) -> None:
    options = {"target_modules": "all-linear", "use_dora": True}
    compared(kind, layout, tmp_path, "adapter.dora=true", **options)


PACKED = [
    *(("qwen3_moe", layout) for layout in (*LAYOUTS, *DIVIDED_EXPERTS) if layout != SHARED),
    # Its experts have the shape [experts, inputs, outputs].
    ("gpt_oss", "single"),
    ("gpt_oss", "tensor 2"),
    *(("gpt_oss", layout) for layout in DIVIDED_EXPERTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), PACKED)
def test_lora_of_packed_experts_equals_peft(kind: str, layout: str, tmp_path: Path) -> None:
    targets = "adapter.targets=[q_proj,experts.*_proj]"
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"target_modules": ["q_proj"], "target_parameters": parameters}
    compared(kind, layout, tmp_path, targets, **options)


@pytest.mark.parametrize(("key", "value"), [("adapter.dora", "true"), ("adapter.dropout", "0.1")])
def test_unsupported_lora_of_packed_experts_is_refused(key: str, value: str) -> None:
    model = without_folder("qwen3_moe", "adapter=lora", "adapter.targets=[experts.down_proj]")
    with pytest.raises(ConfigError, match="as in PEFT; use") as refused:
        run_config([*model, "strategy=single", f"{key}={value}"])
    [problem] = refused.value.problems
    assert problem.key == key


@pytest.mark.parametrize(
    "layout",
    [
        "single",
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in ("tensor 2", "fsdp 2", "pipeline 2")
        ),
    ],
)
def test_lora_plus_equals_optimizer_of_peft(layout: str, tmp_path: Path) -> None:
    groups = 'optimizer.groups={"*.lora_B.*": {lr_scale: 4}}'
    options = {"target_modules": "all-linear"}
    compared("qwen3", layout, tmp_path, groups, loraplus=4.0, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dora"),
    [*((layout, False) for layout in LAYOUTS if layout != SHARED), ("tensor 2", True)],
)
def test_lora_on_nf4_base_equals_peft_with_bitsandbytes(
    layout: str, dora: bool, tmp_path: Path
) -> None:
    options = {"target_modules": "all-linear", "use_dora": dora, "changes": WIDE, "nf4": True}
    base = ("adapter.base=nf4", f"adapter.dora={dora}")
    compared("qwen3", layout, tmp_path, *base, **options)


WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
"""Sizes of which two ranks have whole blocks of 64 values."""


def compared(
    kind: str,
    layout: str,
    folder: Path,
    *more: str,
    loraplus: float | None = None,
    changes: dict[str, Any] | None = None,
    nf4: bool = False,
    **options: Any,
) -> None:
    """Compare five steps of a layout with peft and the same options."""
    save(kind, folder, **(changes or {}))
    overrides = [*LORA, *more, f"model.path={folder}"]
    losses, gradients, start = by_axonlaunch([*overrides, *{**LAYOUTS, **DIVIDED_EXPERTS}[layout]])
    expected, wanted = by_peft(folder, overrides, options, start, loraplus=loraplus, nf4=nf4)
    assert losses == pytest.approx(expected, rel=2e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((gradients[name] - gradient).norm() / gradient.norm()) < 2e-4, name


def by_axonlaunch(overrides: list[str]) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses by step, the last step's gradients, and the adapters' initial values."""
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> tuple[list[float], dict[str, Held], dict[str, Held]]:
        engine, loader = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        start = held((name, p) for name, p in engine.named_parameters() if p.requires_grad)
        losses = []
        for step in range(STEPS):
            losses.append(float(engine.backward(loader.batch(step))[0]))
            gradients = held((name, tensor.grad) for name, tensor in engine.named_updated())
            engine.update()
        assert all(tensor.grad is None for _, tensor in engine.named_updated())
        return losses, gradients, start

    losses, gradients, starts = zip(*World.mock(chosen.launch.nproc).run(run), strict=True)
    assert all(of_rank == losses[0] for of_rank in losses)
    assert all(is_of_adapter(name) for start in starts for name in start)
    return losses[0], gathered(gradients), gathered(starts)


def by_peft(
    path: Path,
    overrides: list[str],
    options: dict[str, Any],
    start: dict[str, Tensor],
    *,
    loraplus: float | None,
    nf4: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the same from a plain loop with the same initial adapters."""
    load: dict[str, Any] = {"quantization_config": nf4_config()} if nf4 else {}
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **load)
    conv = type(base).__name__.startswith("GPT2")
    # Its import takes a second in every worker.
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from peft.optimizers import create_loraplus_optimizer

    adapter = LoraConfig(r=4, lora_alpha=6, fan_in_fan_out=conv, **options)
    model: Any = get_peft_model(base, adapter)
    loaded = set_peft_model_state_dict(
        model, {f"base_model.model.{_theirs(name)}": tensor for name, tensor in start.items()}
    )
    assert not loaded.unexpected_keys
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(start)
    vectors = [p for p in trained.values() if p.ndim < 2]
    matrices = [p for p in trained.values() if p.ndim > 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    settings = {"lr": 3e-3, "eps": 1e-6, "betas": (0.9, 0.99)}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **settings, weight_decay=0.1)
    if loraplus is not None:
        optimizer = create_loraplus_optimizer(
            model,
            torch.optim.AdamW,
            loraplus_lr_ratio=loraplus,
            loraplus_weight_decay=0.1,
            **settings,
        )
    losses: list[float] = []
    model.train()
    for batch in batches(run_config([*SETTINGS, *overrides, "strategy=single"])):
        optimizer.zero_grad()
        logits = model(input_ids=batch.inputs.long()).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients = {_ours(name): p.grad.clone() for name, p in trained.items()}
        optimizer.step()
    return losses, gradients


def nf4_config() -> BitsAndBytesConfig:
    """Return the options with which bitsandbytes stores what ``adapter.base=nf4`` stores."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def _ours(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".default", "")
    name = name.replace("experts.base_layer.lora", "experts.gate_up_proj_lora.lora")
    return name.replace("experts.lora", "experts.down_proj_lora.lora")


def _theirs(name: str) -> str:
    """Convert a name to PEFT's files: magnitudes without ``.weight``, numbered wrappers of
    experts.
    """
    name = name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
    return name.replace("gate_up_proj_lora", "base_layer").replace("down_proj_lora.", "")
