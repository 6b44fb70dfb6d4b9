"""PEFT loads exported adapters, and adapters saved by PEFT train here."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.adapter_runs import LORA, continued, export, logits, trained
from support.configured import run_config
from support.hf_families import save
from support.hf_loops import SETTINGS
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from axonlaunch import checkpoint
from axonlaunch.checkpoint.exchange.adapters import load_peft, read_peft
from axonlaunch.checkpoint.loading import diff, reader
from axonlaunch.config import ConfigError, to_yaml
from axonlaunch.config.options.adapter import is_of_adapter
from axonlaunch.training.text.sampling import load_text_model

# peft 0.21 calls it, but it is deprecated in transformers 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt2", ["strategy=fsdp", "launch.nproc=2", "adapter.targets=[c_attn,c_fc]"]),
        ("gpt2", ["strategy=tensor", "launch.nproc=2", "adapter.dora=true"]),
        (
            "qwen3_moe",
            ["strategy=tensor", "launch.nproc=2", "adapter.targets=[experts.*,v_proj]"],
        ),
        ("qwen3_moe", ["strategy=single", "adapter.targets=[experts.down_proj]"]),
        ("qwen3", ["strategy=tensor", "launch.nproc=2", "adapter.rslora=true"]),
    ],
)
def test_peft_loads_exported_adapter_with_equal_logits(
    kind: str, layout: list[str], tmp_path: Path
) -> None:
    base, run_dir = tmp_path / "base", tmp_path / "run"
    save(kind, base)
    chosen, expected = trained([*LORA, *layout, f"model.path={base}"], run_dir)
    (run_dir / "config.yaml").write_text(to_yaml(chosen))
    (run_dir / "tokenizer").mkdir()
    (run_dir / "tokenizer/tokenizer.json").write_text("{}")
    written = export(chosen, run_dir, tmp_path / "peft", merge=False)
    expected_files = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert sorted(written) == expected_files
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert not torch.allclose(logits(plain), expected, atol=1e-3)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(plain, tmp_path / "peft")
    assert torch.allclose(logits(loaded), expected, atol=1e-5)
    export(chosen, run_dir, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    merged.save_pretrained(base)
    with pytest.raises(ConfigError, match=r"model\.safetensors changed since the run in .* began"):
        export(chosen, run_dir, tmp_path / "again", merge=True)
    assert not (tmp_path / "again").exists()
    base.rename(tmp_path / "moved")
    corrected = (
        rf"model\.path={base}: there is no such folder; .*; correct it in {run_dir}/config.yaml"
    )
    with pytest.raises(ConfigError, match=corrected):
        export(chosen, run_dir, tmp_path / "again", merge=True)
    newest = checkpoint.find_checkpoint(run_dir)
    assert newest is not None
    with pytest.raises(ConfigError, match=corrected):
        diff.faults(newest, chosen)
    (run_dir / "tokenizer").rename(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=corrected):
        load_text_model(run_dir, trusted=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_adapter_on_nf4_base_is_exported_merged_and_resumed(layout: str, tmp_path: Path) -> None:
    base, run_dir = tmp_path / "base", tmp_path / "run"
    save("qwen3", base, hidden_size=128, head_dim=32, intermediate_size=256)
    quantized = [*LORA, "adapter.base=nf4", f"model.path={base}", "launch.nproc=2"]
    chosen, expected = trained([*quantized, f"strategy={layout}"], run_dir)
    export(chosen, run_dir, tmp_path / "peft", merge=False)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options = {"dtype": torch.float32, "quantization_config": nf4}
    plain = AutoModelForCausalLM.from_pretrained(base, **options)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(plain, tmp_path / "peft")
    assert torch.allclose(logits(loaded), expected, atol=1e-3)
    export(chosen, run_dir, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    (run_dir / "config.yaml").write_text(to_yaml(chosen))
    resumed = continued([*SETTINGS, *quantized, "strategy=pipeline"], run_dir)
    assert torch.allclose(resumed, expected, atol=1e-5)
    with pytest.raises(ConfigError, match=r"was trained on a base with adapter\.base=nf4"):
        continued([*SETTINGS, *quantized, "strategy=ddp", "adapter.base=null"], run_dir)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("tensor", {"modules_to_save": ["model.embed_tokens", "lm_head"]}),
        ("pipeline", {}),
        ("fsdp", {"use_dora": True}),
    ],
)
def test_run_starts_from_peft_adapter(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base, folder, layout = tmp_path / "base", tmp_path / "peft", [f"strategy={strategy}"]
    save("qwen3", base)
    of_peft = saved_by_peft(base, folder, target_modules=["q_proj", "down_proj"], **options)
    overrides = ["adapter=lora", f"adapter.path={folder}", f"model.path={base}", "launch.nproc=2"]
    chosen, loaded = trained([*overrides, *layout], tmp_path / "run", steps=0)
    assert torch.allclose(loaded, of_peft, atol=1e-5)
    assert chosen.adapter is not None
    assert (chosen.adapter.rank, chosen.adapter.alpha, chosen.adapter.rslora) == (3, 5.0, True)
    assert chosen.adapter.dora is ("use_dora" in options)
    assert len(chosen.adapter.targets) == 4
    full = [f"{module}.weight" for module in options.get("modules_to_save", [])]
    assert sorted(chosen.train.unfreeze) == sorted(full)


def test_run_starts_from_export_with_trained_tied_embedding(tmp_path: Path) -> None:
    base, run_dir, folder = tmp_path / "base", tmp_path / "run", tmp_path / "peft"
    save("qwen3", base, tie_word_embeddings=True)
    first = [*LORA, f"model.path={base}", "strategy=single", "train.unfreeze=['*embed_tokens*']"]
    chosen, expected = trained(first, run_dir)
    export(chosen, run_dir, folder, merge=False)
    second = ["adapter=lora", f"adapter.path={folder}", f"model.path={base}", "strategy=single"]
    again, loaded = trained(second, tmp_path / "second", steps=0)
    assert torch.allclose(loaded, expected, atol=1e-5)
    assert again.train.unfreeze == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("parameters", [["down_proj"], ["down_proj", "gate_up_proj"]])
def test_run_starts_from_peft_adapter_of_packed_experts(
    parameters: list[str], tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "peft"
    save("qwen3_moe", base)
    targets = [f"mlp.experts.{name}" for name in parameters]
    of_peft = saved_by_peft(base, folder, target_modules=["q_proj"], target_parameters=targets)
    overrides = ["adapter=lora", f"adapter.path={folder}", f"model.path={base}"]
    _, loaded = trained([*overrides, "strategy=single"], tmp_path / "run", steps=0)
    assert torch.allclose(loaded, of_peft, atol=1e-5)


def saved_by_peft(base: Path, folder: Path, **options: Any) -> Tensor:
    """Save an adapter with random matrices, and return its logits."""
    torch.manual_seed(0)
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=3, lora_alpha=5, use_rslora=True, init_lora_weights=False, **options),
    )
    for name, parameter in model.named_parameters():
        if "lora_magnitude_vector" in name or "modules_to_save" in name:
            parameter.data *= 1 + torch.rand(parameter.shape)
    model.save_pretrained(folder)
    return logits(model)


@pytest.mark.parametrize(
    ("overrides", "change", "message"),
    [
        ([], {"use_dora": True}, "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        ([], {"trainable_token_indices": [1]}, "it has trainable_token_indices="),
        ([], {"bias": "all"}, "it has bias=all"),
        ([], {"peft_type": "IA3"}, "peft_type is IA3"),
        (["adapter.rank=16"], {}, "has 3; remove this setting"),
        (["adapter.path=nowhere"], {}, "is not a folder of PEFT's"),
        (["model.config.hidden_size=128"], {}, "the model's is [3, 128]"),
    ],
)
def test_adapter_folder_of_other_kind_or_model_is_refused(
    overrides: list[str], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base, folder = tmp_path / "base", tmp_path / "peft"
    save("qwen3", base)
    saved_by_peft(base, folder, target_modules=["q_proj"])
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    chosen = [f"adapter.path={folder}", f"model.path={base}", "model.init=random", *overrides]
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        run_config([*SETTINGS, "adapter=lora", "strategy=single", *chosen])


DAMAGED_SETTINGS: dict[str, tuple[str, str]] = {
    "a list": ("[1]", "it holds list where keys belong"),
    "deep JSON": ('{"r": ' + "[" * 100_000 + "]" * 100_000 + "}", "RecursionError"),
    "target_parameters": ('"target_parameters": 5', "target_parameters=5, not a list of names"),
    "parameters' names": ('"target_parameters": [5]', "target_parameters=[5], not a list of names"),
    "a large alpha": ('"lora_alpha": 1' + "0" * 400, "not a number above 0 and at most 1e9"),
    "an infinite alpha": ('"lora_alpha": 1e999', "lora_alpha=inf, not a number above 0"),
    "alpha NaN": ('"lora_alpha": NaN', "lora_alpha=nan, not a number above 0"),
    "a text for alpha": ('"lora_alpha": "5"', "lora_alpha=5, not a number above 0"),
    "true for alpha": ('"lora_alpha": true', "lora_alpha=True, not a number above 0"),
    "rank 0": ('"r": 0', "r=0, not a whole number above 0"),
    "a fraction for rank": ('"r": 2.5', "r=2.5, not a whole number above 0"),
    "a large rank": ('"r": 1' + "0" * 400, "does not fit its r=1"),
    "a text for a flag": ('"use_dora": "no"', "use_dora=no, not true or false"),
    "a long text": (f'"bias": "{"x" * 9_000}"', "it has bias='x"),
}
"""Settings of ``adapter_config.json``, or its full text, and the expected error."""


@pytest.mark.parametrize("case", DAMAGED_SETTINGS)
def test_a_hostile_adapter_config_is_one_short_error(case: str, tmp_path: Path) -> None:
    text, message = DAMAGED_SETTINGS[case]
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 5}
    if text.startswith('"'):
        text = json.dumps(settings)[:-1] + f", {text}}}"
    (tmp_path / "adapter_config.json").write_text(text)
    save_file(LORA_TENSORS, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError) as raised:
        read_peft(tmp_path)
    [problem] = raised.value.problems
    assert problem.key == "adapter.path"
    assert message in problem.message
    assert len(problem.message) < 500


LORA_TENSORS = {
    "base_model.model.layer.lora_A.weight": torch.ones(3, 8),
    "base_model.model.layer.lora_B.weight": torch.ones(8, 3),
}


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("swap", ["link", "fifo", "device", "folder"])
def test_adapter_file_that_is_special_file_is_refused(swap: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 5}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(LORA_TENSORS, folder / "adapter_model.safetensors")
    assert read_peft(folder).targets == ("layer",)
    file = folder / name
    outside = file.rename(tmp_path / name)
    if swap == "fifo":
        os.mkfifo(file)
    elif swap == "folder":
        file.mkdir()
    else:
        file.symlink_to(outside if swap == "link" else "/dev/zero")
    with pytest.raises(ConfigError, match=rf"adapter\.path=.*{name}: can't be read: is not a reg"):
        read_peft(folder)
    if name == "adapter_model.safetensors":
        with pytest.raises(ConfigError, match="is not a regular file"):
            load_peft({}, folder)


def test_adapter_tensors_that_are_not_of_floating_point_are_refused(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 5}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {name: tensor.long() for name, tensor in LORA_TENSORS.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="is of type I64; an adapter has F64, F32, F16 or BF16"):
        read_peft(tmp_path)


def test_adapter_without_peft_format_is_refused_but_can_be_merged(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "base")
    overrides = [
        f"model.path={tmp_path}/base",
        "strategy=single",
        "train.unfreeze=['*q_proj.bias']",
    ]
    chosen, expected = trained([*LORA, *overrides], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"q_proj\.bias is trained in addition .* use --merge"):
        export(chosen, tmp_path / "run", tmp_path / "peft", merge=False)
    export(chosen, tmp_path / "run", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), expected, atol=1e-5)


def test_peft_loads_modules_that_were_trained_with_an_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    save("qwen3", tmp_path / "base")
    overrides = [f"model.path={tmp_path}/base", "strategy=single", "train.unfreeze=['*layernorm*']"]
    chosen, expected = trained([*LORA, *overrides], tmp_path / "run")
    export(chosen, tmp_path / "run", tmp_path / "peft", merge=False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "peft")
    assert torch.allclose(logits(loaded), expected, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_and_refers_to_the_base_by_its_hash(tmp_path: Path) -> None:
    base, run_dir = tmp_path / "base", tmp_path / "run"
    save("qwen3", base)
    overrides = [*LORA, f"model.path={base}", "strategy=fsdp", "launch.nproc=2", "train.steps=4"]
    chosen, expected = trained(overrides, run_dir)
    saved = checkpoint.find_checkpoint(run_dir)
    assert saved is not None
    assert all(is_of_adapter(name) for name in reader.parameters(saved))
    assert diff.faults(saved, chosen) == []
    digest = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    assert json.loads((run_dir / "base.json").read_text()) == {
        "files": {"model.safetensors": digest}
    }
    resumed = continued([*SETTINGS, *overrides, "strategy=tensor"], run_dir)
    assert torch.allclose(resumed, expected, atol=1e-5)
    save("qwen3", base, initializer_range=0.03)
    with pytest.raises(ConfigError, match="its SHA-256 differs"):
        run_config([*SETTINGS, *overrides, f"checkpoint.resume={run_dir}"])
