"""Weights are exported, imported, and start a run in any layout."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.configured import run_config
from torch import nn

from axonlaunch import checkpoint, config, data
from axonlaunch.checkpoint import Checkpoint, Retention
from axonlaunch.checkpoint.exchange import weights
from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig, to_yaml, with_values
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine
from axonlaunch.models.build import build_model
from axonlaunch.models.modules.module_state import model_state

DATA = ["data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=16"]
SMALL = ["model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4"]
MODELS = {
    "gpt": ["model=gpt", *SMALL, "model.vocab_size=64", *DATA],
    "gpt, gelu_new, untied": [
        *("model=gpt", *SMALL, "model.vocab_size=64", *DATA),
        *("model.activation_function=gelu_new", "model.tie_word_embeddings=false"),
    ],
    "llama": [
        *("model=llama_debug", *SMALL, "model.vocab_size=64", *DATA),
        *("model.num_key_value_heads=2", "model.intermediate_size=48"),
    ],
    "llama, tied": [
        *("model=llama_debug", *SMALL, "model.vocab_size=64", *DATA),
        *("model.num_key_value_heads=4", "model.tie_word_embeddings=true"),
    ],
    "mlp": ["model=mlp", "model.hidden_size=24", "model.input_size=784", "data=synthetic_images"],
    "normed": [
        *("model=custom", "model.target=support.normed:build", "data=synthetic_images"),
        *("data.image_size=8", "data.num_channels=1"),
    ],
}
LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, ["strategy=ddp"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "tensor": (2, ["strategy=tensor"]),
    "pipeline": (2, ["strategy=pipeline", "train.micro_batch_size=2"]),
    "hybrid": (
        8,
        [
            *("strategy=fsdp", "strategy.tensor.degree=2", "strategy.pipeline.degree=2"),
            "train.micro_batch_size=2",
        ],
    ),
}


def saved(run_dir: Path, model: str) -> tuple[RunConfig, nn.Module, Checkpoint]:
    """Save a run of a model with random weights and biases, at step 3."""
    chosen = config.load([*MODELS[model], "strategy=single", f"run_dir={run_dir}", "name=saved"])
    module = build_model(chosen.model, seed=0).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(to_yaml(chosen))

    def on_rank(world: World) -> None:
        saver = Saver(run_dir, world=world, retention=Retention(newest=1))
        saver.save({"model": model_state(module)}, step=3, samples=24)

    World.mock(1).run(on_rank)
    newest = checkpoint.latest(run_dir)
    assert newest is not None
    return chosen, module, newest


def export(saved_checkpoint: Checkpoint, chosen: RunConfig, folder: Path, **how: Any) -> list[str]:
    return weights.export_weights(saved_checkpoint, chosen, folder, **how)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("name", "source"),
    [
        *((name, "safetensors") for name in LAYOUTS),
        ("fsdp", "run"),
        *((n, "run") for n in LAYOUTS if n != "fsdp"),
    ],
)
def test_any_layout_starts_from_exported_weights(name: str, source: str, tmp_path: Path) -> None:
    _, module, newest = saved(tmp_path / "run", "llama")
    path = tmp_path / "run"
    if source == "safetensors":
        path = tmp_path / "out"
        export(newest, config.read_frozen(tmp_path / "run"), path)
    ranks, overrides = LAYOUTS[name]
    arguments = [*MODELS["llama"], *overrides, f"launch.nproc={ranks}", f"model.weights={path}"]
    chosen = run_config([*arguments, "train.global_batch_size=8"])
    layout = Layout.of(chosen, world_size=ranks)

    def on_rank(world: World) -> dict[str, torch.Tensor]:
        loader = rank_loader(
            chosen, data.build_dataset(chosen.data), layout=layout, rank=world.rank
        )
        engine = build_engine(chosen, world, sample=sample_inputs(loader.dataset))
        weights.load_initial_weights(engine, chosen.model, world=world)
        parameters = engine.state_dict()["model"]
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
            for name, t in parameters.items()
        }

    got = {name: t for of_rank in World.mock(ranks).run(on_rank) for name, t in of_rank.items()}
    for name, tensor in model_state(module).items():
        assert torch.equal(got[name], tensor), name


def test_export_converts_dtype(tmp_path: Path) -> None:
    chosen, module, newest = saved(tmp_path / "run", "llama")
    export(newest, chosen, tmp_path / "out", dtype="bf16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    expected = module.get_parameter("norm.weight").bfloat16()
    assert torch.equal(tensors["norm.weight"], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("model", ["gpt", "llama", "mlp"])
def test_export_keeps_the_names_and_values_of_parameters(model: str, tmp_path: Path) -> None:
    chosen, module, newest = saved(tmp_path / "run", model)
    export(newest, chosen, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    parameters = dict(module.named_parameters())
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], parameters[name]) for name in tensors)


@pytest.mark.parametrize("model", ["gpt, gelu_new, untied", "llama"])
def test_imported_gpt_and_llama_have_the_settings_and_weights_of_the_export(
    model: str, tmp_path: Path
) -> None:
    chosen, module, newest = saved(tmp_path / "run", model)
    export(newest, chosen, tmp_path / "out")
    weights.import_weights(tmp_path / "out", tmp_path / "again", chosen)
    assert config.read_frozen(tmp_path / "again").model == chosen.model
    imported = checkpoint.latest(tmp_path / "again")
    assert imported is not None
    state = {name: torch.zeros_like(tensor) for name, tensor in model_state(module).items()}
    checkpoint.load_model(imported, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in model_state(module).items())


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_weights_of_transformers_are_refused_for_gpt_and_llama(model: str, tmp_path: Path) -> None:
    chosen, module, newest = saved(tmp_path / "run", model)
    export(newest, chosen, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps({"model_type": "llama"}))
    expected = f"{file}: is of a model of transformers; use model=hf model.path={file.parent}"
    with pytest.raises(ConfigError) as of_weights:
        weights.differences(tmp_path / "out", chosen.model, module)
    with pytest.raises(ConfigError) as of_import:
        weights.import_weights(tmp_path / "out", tmp_path / "again", chosen)
    assert str(of_weights.value) == str(of_import.value) == expected


def test_export_does_not_overwrite(tmp_path: Path) -> None:
    chosen, _, newest = saved(tmp_path / "run", "mlp")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ConfigError, match="out: is there already; give a new folder"):
        export(newest, chosen, tmp_path / "out")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make the system refuse larger files, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_there", [False, True])
def test_failed_export_leaves_nothing_and_can_be_repeated(is_there: bool, tmp_path: Path) -> None:
    chosen, _, saved_checkpoint = saved(tmp_path / "run", "llama")
    out = tmp_path / "out"
    if is_there:
        out.mkdir()
    with files_of_at_most(4096), pytest.raises(ConfigError) as raised:
        export(saved_checkpoint, chosen, out)
    reason = "File too large; free some space, or write elsewhere"
    assert str(raised.value) == f"{out}: can't be written: {reason}"
    assert out.exists() == is_there
    assert export(saved_checkpoint, chosen, out)


def test_failed_import_leaves_nothing_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    chosen, _, saved_checkpoint = saved(tmp_path / "run", "llama")
    export(saved_checkpoint, chosen, tmp_path / "out")
    imported = tmp_path / "imported"
    with files_of_at_most(4096), pytest.raises(ConfigError, match="can't be written: File too"):
        weights.import_weights(tmp_path / "out", imported, chosen)
    assert not imported.exists()
    assert weights.import_weights(tmp_path / "out", imported, chosen).is_dir()


def test_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    chosen, _, newest = saved(tmp_path / "run", "mlp")
    file = newest.path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"__0_0\.distcp is not what was written"
    ):
        export(newest, chosen, tmp_path / "out")


def test_running_statistics_are_exported_and_loaded(tmp_path: Path) -> None:
    chosen, _, newest = saved(tmp_path / "run", "normed")
    export(newest, chosen, tmp_path / "out")
    assert weights.differences(tmp_path / "out", chosen.model, build_model(chosen.model)) == []
    again = with_values(chosen, {"model.weights": str(tmp_path / "out")})

    def run(world: World) -> dict[str, torch.Tensor]:
        inputs = sample_inputs(data.build_dataset(again.data))
        engine = build_engine(again, world, sample=inputs)
        weights.load_initial_weights(engine, again.model, world=world)
        state: dict[str, torch.Tensor] = engine.state_dict()["model"]
        return state

    [state] = World.mock(1).run(run)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert any("running_mean" in name for name in written)
    for name, tensor in written.items():
        assert torch.equal(state[name], tensor), name


def test_each_name_and_shape_of_another_model_is_reported(tmp_path: Path) -> None:
    chosen, _, newest = saved(tmp_path / "run", "llama")
    export(newest, chosen, tmp_path / "out")
    other = config.load([*MODELS["llama"], "model.num_hidden_layers=3", "strategy=single"])
    with torch.device("meta"):
        module = build_model(other.model, seed=0)
    reported = weights.differences(tmp_path / "out", other.model, module)
    assert len(reported) == 9
    assert reported[0] == "layers.2.input_layernorm.weight is missing"
    wider = config.load([*MODELS["llama"], "model.vocab_size=128", "strategy=single"])
    reported = weights.differences(tmp_path / "out", wider.model, build_model(wider.model, seed=0))
    assert reported == [
        "embed_tokens.weight has shape [64, 32], not [128, 32]",
        "lm_head.weight has shape [64, 32], not [128, 32]",
    ]


def test_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    chosen, module, newest = saved(tmp_path / "run", "mlp")
    export(newest, chosen, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors: can't be read: "):
        weights.differences(tmp_path / "out", chosen.model, module)
    assert step_folders.damage(newest) == []
