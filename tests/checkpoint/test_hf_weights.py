"""Weights of transformers' models: ranks read their shards, and exports have its format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stranger
from support.configured import run_config
from support.hf_families import FAMILIES, save
from support.rank_engine import rank_engine
from torch import Tensor

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.exchange import safetensors, weights
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig, to_yaml, with_values
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.build import build_model
from axonlaunch.models.hf import exported
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.hf.reading.conversion import conversion
from axonlaunch.models.modules.module_state import model_state
from axonlaunch.models.tensors.dtensor_regions import full_tensor
from axonlaunch.models.tensors.saved_tensors import Computed

DATA = ["data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=4"]


def chosen(path: Path, *more: str) -> RunConfig:
    return run_config(["model=hf", f"model.path={path}", *DATA, "checkpoint.every=0", *more])


def refusal(path: Path, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        chosen(path, "strategy=single", *more)
    return str(caught.value)


def started(config: RunConfig) -> dict[str, Tensor]:
    """Return the full parameters that ranks start from."""
    assert config.launch.nproc != "auto"

    def run(world: World) -> dict[str, Tensor]:
        engine, _ = rank_engine(config, world)
        weights.load_initial_weights(engine, config.model, world=world)
        return {name: full_tensor(p.detach()).clone() for name, p in engine.named_parameters()}

    return World.mock(config.launch.nproc).run(run)[0]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["gpt2", "opt", "gemma2", "phi3", "mixtral", "qwen3_moe"])
def test_every_layout_loads_a_save_pretrained_folder(kind: str, tmp_path: Path) -> None:
    expected = dict(save(kind, tmp_path).named_parameters())
    for layout in (["strategy=single"], ["strategy=fsdp", "launch.nproc=3"]):
        parameters = started(chosen(tmp_path, *layout, "train.global_batch_size=6"))
        assert parameters.keys() == expected.keys()
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected[name]), name


def test_rank_reads_only_its_shard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from axonlaunch.models.tensors.tensor_origins import Piece

    numbers = []
    read = Piece.read

    def counted(piece: Piece, *args: Any) -> Tensor:
        values = read(piece, *args)
        numbers.append(values.numel())
        return values

    model = save("mixtral", tmp_path)
    monkeypatch.setattr(Piece, "read", counted)
    started(chosen(tmp_path, "strategy=fsdp", "launch.nproc=2"))
    count = sum(p.numel() for p in model.parameters())
    assert sum(numbers) == count  # both ranks together
    assert max(numbers) <= max(p.numel() for p in model.parameters()) // 2


def test_weights_of_several_files_are_read(tmp_path: Path) -> None:
    from support.hf_families import theirs

    model = theirs("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    parameters = started(chosen(tmp_path, "strategy=fsdp", "launch.nproc=2"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameters[name], parameter)


def test_missing_safetensors_shard_is_named(tmp_path: Path) -> None:
    from support.hf_families import theirs

    theirs("qwen3").save_pretrained(tmp_path, max_shard_size="100KB")
    [gone, *_] = sorted(tmp_path.glob("*.safetensors"))
    gone.unlink()
    assert f"names {gone.name}, which its folder lacks" in refusal(tmp_path)


def test_truncated_safetensors_shard_is_named(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors: can't be read" in refusal(tmp_path)


def test_weights_of_another_configuration_are_refused(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    message = refusal(tmp_path, "model.config.intermediate_size=64")
    assert message.startswith(f"model.path={tmp_path}: they were saved with a different model: ")
    assert "model.layers.0.mlp.gate_proj.weight has shape [128, 64], not [64, 64]" in message
    assert "model.layers.1.mlp.up_proj.weight is unexpected" in refusal(
        tmp_path, "model.config.num_hidden_layers=1"
    )


def test_weights_that_lack_a_block_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    message = refusal(tmp_path, "model.config.num_hidden_layers=3")
    assert "model.layers.2.self_attn.q_proj.weight is missing" in message


def test_pretrained_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "contains no *.safetensors and no checkpoint" in refusal(tmp_path)
    chosen(tmp_path, "strategy=single", "model.init=random")


def test_conversion_that_needs_full_tensors_is_computed(tmp_path: Path) -> None:
    """GPT-NeoX's experts and similar: the converter does more than move numbers."""
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Doubled(ConversionOps):
        def convert(self, input_dict: Any, target_patterns: Any, **_: Any) -> Any:
            [values] = input_dict.values()
            value = values[0] if isinstance(values, list) else values
            return {target_patterns[0]: value + value}

    from axonlaunch.models.hf.reading import library

    converter = WeightConverter("lm_head.weight", "lm_head.weight", [Doubled()])
    model = structure(chosen_model("qwen3")).model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            library,
            "targets",
            lambda model, names: [
                ("lm_head.weight", "lm_head.weight", "lm_head.weight", converter)
            ],
        )
        lm_head = conversion(model, {"lm_head.weight": (256, 64)}).parameters["lm_head.weight"]
    assert isinstance(lm_head, Computed)
    values = torch.randn(256, 64)
    into = torch.empty(2, 64)
    lm_head.read(lambda name, region: values, [5, 0], [2, 64], into)
    assert torch.equal(into, 2 * values[5:7])


def chosen_model(kind: str) -> Any:
    from axonlaunch.config.options.model import HuggingFaceConfig

    return HuggingFaceConfig(config=FAMILIES[kind], init="random")


def saved(config: RunConfig, run_dir: Path) -> Any:
    """Save a run with random weights; return its model."""
    config = with_values(config, {"run_dir": str(run_dir), "name": "saved"})
    module = build_model(config.model, seed=1).eval()
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(to_yaml(config))

    def on_rank(world: World) -> None:
        saver = Saver(run_dir, world=world, retention=Retention(newest=1))
        saver.save({"model": model_state(module)}, step=3, samples=12)

    World.mock(1).run(on_rank)
    return module


@pytest.mark.slow(keep=3)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", FAMILIES)
def test_from_pretrained_loads_export(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save(kind, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    config = chosen(tmp_path / "model", "strategy=single", "model.init=random")
    module = saved(config, tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    written = weights.export_weights(newest, config, tmp_path / "out", file_bytes=150_000)
    assert {"config.json", "generation_config.json", "tokenizer.json"} < {*written}
    reloaded, about = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(about.values()), about
    assert reloaded.config.use_cache
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(tokens).logits, module(tokens))
    source_config = json.loads((tmp_path / "model" / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key for key in source_config if source_config[key] != after.get(key)} <= {"use_cache"}


def test_refused_import_names_model_hf(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=f"use model=hf model.path={tmp_path}"):
        weights.describe_folder(tmp_path)


@pytest.mark.filterwarnings("default")
def test_exported_hf_model_is_imported_and_sampled(tmp_path: Path) -> None:
    from axonlaunch.training.text.sampling import continue_prompt
    from axonlaunch.training.text.sampling_options import SamplingOptions

    save("qwen3", tmp_path / "model")
    text = ["data=python_source", "data.sequence_length=16"]
    config = chosen(tmp_path / "model", "strategy=single", "model.init=random", *text)
    saved(config, tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    weights.export_weights(newest, config, tmp_path / "out")
    taken = weights.import_weights(tmp_path / "out", tmp_path / "again", config)
    assert taken.exists()
    greedy = SamplingOptions(tokens=8, temperature=0)
    expected = continue_prompt(tmp_path / "run", "def ", greedy)
    assert continue_prompt(tmp_path / "out", "def ", greedy) == expected
    assert continue_prompt(tmp_path / "again", "def ", greedy) == expected


@pytest.mark.parametrize("prepared", ["link", "fifo"])
def test_link_out_of_the_model_folder_is_not_exported(prepared: str, tmp_path: Path) -> None:
    save("llama", tmp_path / "model")
    file, out = tmp_path / "model" / "tokenizer.json", tmp_path / "out"
    file.symlink_to("/etc/hostname") if prepared == "link" else os.mkfifo(file)
    out.mkdir()
    config = HuggingFaceConfig(path=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="can't be copied: is not a regular file"):
        exported.copy_other_files(config, out)
    assert not os.path.lexists(out / "tokenizer.json")


def test_exported_extra_files_keep_permissions_and_have_a_size_limit(
    tmp_path: Path,
) -> None:
    save("llama", tmp_path / "model")
    config, file = HuggingFaceConfig(path=str(tmp_path / "model")), tmp_path / "model/private.txt"
    file.write_text("text")
    file.chmod(0o600)
    (tmp_path / "out").mkdir()
    assert "private.txt" in exported.copy_other_files(config, tmp_path / "out")
    assert (tmp_path / "out/private.txt").read_text() == "text"
    assert (tmp_path / "out/private.txt").stat().st_mode & 0o777 == 0o600
    os.truncate(file, 5 << 30)
    (tmp_path / "large").mkdir()
    with pytest.raises(ConfigError, match=r"private.txt can't be copied: is larger than 268435456"):
        exported.copy_other_files(config, tmp_path / "large")
    assert not (tmp_path / "large/private.txt").exists()


def test_safetensors_index_with_values_that_are_not_file_names_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"a": ["model.safetensors"], "b": None}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="which is not a file name"):
        safetensors._files(tmp_path)


def test_a_folder_of_pickled_weights_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(stranger.bomb(tmp_path / "executed"))
    with pytest.raises(ConfigError, match=r"contains no \*\.safetensors"):
        chosen(tmp_path / "model", "strategy=single", "model.init=pretrained")
    assert not (tmp_path / "executed").exists()
