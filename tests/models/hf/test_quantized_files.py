"""LoRA on weights that bitsandbytes quantized and saved: the same values, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file, save_file
from support.adapter_runs import LORA, continued, export, logits, trained
from support.configured import estimate_config, run_config
from support.gathered import gathered, held
from support.hf_families import FAMILIES, save
from support.hf_loops import SETTINGS
from support.rank_engine import rank_engine
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import ConfigError, to_yaml
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.hf.architecture import architecture
from axonlaunch.models.tensors.packed_blocks import format_of
from axonlaunch.planning.memory.estimate import estimate

# peft 0.21 calls it, but it is deprecated in transformers 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

NF4 = [*LORA, "adapter.base=nf4"]
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}


def save_nf4(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Save a model that bitsandbytes has quantized, and return its folder."""
    save("qwen3", folder / "plain", **SIZES)
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **options}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain",
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(**nf4),
    )
    model.save_pretrained(folder / "nf4")
    return folder / "nf4"


def values_of_bitsandbytes(folder: Path) -> dict[str, Tensor]:
    """Return the values of all parameters of a saved model, as bitsandbytes dequantizes them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {
        name: dequantize_4bit(parameter.data, state)
        if (state := getattr(parameter, "quant_state", None)) is not None
        else parameter.data
        for name, parameter in model.named_parameters()
    }


def values_here(overrides: list[str]) -> dict[str, Tensor]:
    """Return the values of all frozen parameters, gathered from the ranks of a layout."""
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> Any:
        engine, _ = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        return held(engine.named_parameters())

    stored = gathered(World.mock(chosen.launch.nproc).run(run))
    return {
        name: tensor
        if (block_format := format_of(tensor)) is None
        else block_format.dequantize(tensor, torch.float32)
        for name, tensor in stored.items()
        if "lora_" not in name
    }


SKIPPED = {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]}
"""Option that leaves the 3 linear layers of the second block's MLP unquantized."""


@pytest.mark.parametrize(
    ("overrides", "is_nested"),
    [
        ("strategy=fsdp", True),
        ("strategy=tensor", True),
        ("strategy=tensor", False),
        ("strategy=pipeline adapter=null", True),
    ],
)
def test_quantized_weights_of_two_ranks_equal_those_that_bitsandbytes_saved(
    overrides: str, is_nested: bool, tmp_path: Path
) -> None:
    folder = save_nf4(tmp_path, bnb_4bit_use_double_quant=is_nested, **SKIPPED)
    expected = values_of_bitsandbytes(folder)
    ours = values_here([*NF4, f"model.path={folder}", *overrides.split(), "launch.nproc=2"])
    assert ours.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []


def test_16_bit_weights_and_codes_stored_as_16_bit_numbers_are_read(tmp_path: Path) -> None:
    folder = save_nf4(tmp_path, dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert load_file(folder / "model.safetensors")[name].dtype is torch.bfloat16
    ours = values_here([*NF4, f"model.path={folder}", "strategy=single"])
    expected = values_of_bitsandbytes(folder)[name]
    assert expected.dtype is torch.bfloat16
    assert torch.equal(ours[name].bfloat16(), expected)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["tensor", "fsdp"])
def test_adapter_on_quantized_files_gives_logits_of_peft_and_is_merged_and_resumed(
    layout: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    folder, run_dir = save_nf4(tmp_path, bnb_4bit_use_double_quant=True), tmp_path / "run"
    overrides = [*NF4, f"model.path={folder}", "launch.nproc=2"]
    chosen, expected = trained([*overrides, f"strategy={layout}"], run_dir)
    export(chosen, run_dir, tmp_path / "peft", merge=False)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not torch.allclose(logits(base), expected, atol=1e-3)
    loaded = PeftModel.from_pretrained(base, tmp_path / "peft")
    assert torch.allclose(logits(loaded), expected, atol=1e-5)
    export(chosen, run_dir, tmp_path / "merged", merge=True)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    (run_dir / "config.yaml").write_text(to_yaml(chosen))
    resumed = continued([*SETTINGS, *overrides, "strategy=pipeline"], run_dir)
    assert torch.allclose(resumed, expected, atol=1e-5)


@pytest.mark.parametrize("depth", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_estimate_counts_bytes_of_quantized_files(depth: int, tmp_path: Path) -> None:
    save("qwen3", tmp_path, **SIZES, num_hidden_layers=depth)
    skipped = {"llm_int8_skip_modules": ["lm_head", r"model.layers.\d*[13579].mlp"]}
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, **skipped}
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    nf4 = {"quantization_config": {**quantization, "bnb_4bit_quant_type": "nf4"}}
    file.write_text(json.dumps(content | nf4))
    overrides = [*SETTINGS, *NF4, f"model.path={tmp_path}", "strategy=fsdp", "launch.nproc=2"]
    [estimated] = estimate(estimate_config([*overrides, "hardware=cpu"])).ranks
    chosen = estimate_config(overrides)

    def run(world: World) -> int:
        engine, _ = rank_engine(chosen, world)
        [model] = engine.modules  # type: ignore[attr-defined]
        tensors = [*model.parameters(), *model.buffers()]
        return sum(local_part(tensor).nbytes for tensor in tensors)

    assert estimated.breakdown["parameters"] == World.mock(2).run(run)[0]


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8"),
        *(({"quant_method": name}, name) for name in ("gptq", "awq", "fp8", "mxfp4")),
    ],
)
def test_weights_in_other_quantized_formats_are_refused_by_name(
    quantization: dict[str, Any], name: str, tmp_path: Path
) -> None:
    content = {**FAMILIES["llama"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        architecture(HuggingFaceConfig(path=str(tmp_path)))
    assert f"its weights are quantized ({name}), which can't be trained" in str(refused.value)


def test_transposed_quantized_weights_are_refused(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    file = tmp_path / "config.json"
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": nf4}))
    with pytest.raises(ConfigError, match=r"c_attn is saved quantized and transposed"):
        run_config([*SETTINGS, *NF4, f"model.path={tmp_path}", "strategy=single"])


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({}, ["adapter.base=int8"], "down_proj.weight is saved in nf4, not in int8"),
        ({"blocksize": 128}, [], "it has blocks of 128 values, and only 64 is supported"),
        ({"shape": [64, 128]}, [], "8192 codes don't fit its shape [64, 128]"),
        ({"shape": "x"}, [], "q_proj.weight can't be read as NF4"),
        ({"nested_blocksize": 1}, [], "its nested_absmax does not fit blocks of 1 scales"),
        (None, [], "q_proj.weight is saved unquantized, not in nf4"),
    ],
    ids=str,
)
def test_quantized_files_that_contradict_themselves_or_the_adapter_are_refused(
    change: dict[str, Any] | None, overrides: list[str], message: str, tmp_path: Path
) -> None:
    folder = save_nf4(tmp_path, bnb_4bit_use_double_quant=True)
    file, name = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(file)
    state = f"{name}.quant_state.bitsandbytes__nf4"
    if change is None:
        parts = [key for key in tensors if key.startswith(f"{name}.")]
        tensors = {key: value for key, value in tensors.items() if key not in parts}
        tensors[name] = torch.zeros(128, 128)
    else:
        text = json.dumps(json.loads(bytes(tensors[state].tolist())) | change)
        tensors[state] = torch.tensor([*text.encode()], dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        run_config([*SETTINGS, *NF4, f"model.path={folder}", "strategy=single", *overrides])
    assert message in str(refused.value)
    assert len(refused.value.problems) == 1
