"""``axonlaunch sample``: from a run, from an export of it, and from an import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import Served
from support.served import Server

from axonlaunch.config import ConfigError
from axonlaunch.training.text.sampling import load_text_model

MODEL = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
SHORT = ["strategy=single", "train.steps=2", "train.eval_batches=0"]
SHORT += ["checkpoint.every=2", "train.global_batch_size=4"]
TEXT = ["data=text", "data.files=[text.txt]", "data.sequence_length=16", "model.vocab_size=260"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Served:
    """Return the command in a folder with runs on text, on tokens and on images, and exports."""
    command = Served(tmp_path_factory.mktemp("runs"), server)
    (command.folder / "text.txt").write_text("to be or not to be. " * 60)
    command("train", *MODEL, *SHORT, *TEXT, "name=text")
    command("train", *MODEL, *SHORT, "data=synthetic_tokens", "name=tokens")
    images = ["model=mlp", "model.hidden_size=8", "data=synthetic_images"]
    command("train", *SHORT, *images, "name=images")
    for run in ("text", "tokens", "images"):
        command("checkpoint", "export", f"runs/{run}", f"exported/{run}")
    for run in ("text", "tokens"):
        command("checkpoint", "import", f"exported/{run}", f"imported/{run}")
    return command


@pytest.mark.slow
def test_a_run_its_export_and_that_imported_write_the_same_text(trained: Served) -> None:
    overrides = ["--prompt", "to be ", "--tokens", "40", "--json"]
    run, exported, imported = (
        json.loads(trained("sample", folder, *overrides).stdout)
        for folder in ("runs/text", "exported/text", "imported/text")
    )
    assert run["prompt"] == "to be "
    assert len(run["text"].encode()) >= 20
    assert exported == imported == run


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("runs/tokens", "runs/tokens: the run was trained on data=synthetic_tokens with "),
        ("exported/tokens", "exported/tokens: its model was trained on data=synthetic_tokens "),
        ("imported/tokens", "imported/tokens: the run was trained on data=synthetic_tokens "),
        ("runs/images", "runs/images: the run was trained on data=synthetic_images; only "),
        (
            "exported/images",
            "exported/images/config.json: is of model=mlp; only gpt, llama, moe ",
        ),
        ("exported", "exported: no run folder (it has no config.yaml)"),
    ],
)
def test_sample_refuses_models_without_text(folder: str, message: str, trained: Served) -> None:
    [error] = trained("sample", folder, status=2).stderr.splitlines()
    assert error.startswith(f"error: {message}")


def test_sample_of_a_checkpoint_names_the_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("name: run\n")
    with pytest.raises(ConfigError, match=f"no run folder .*; did you mean {tmp_path}/run\\?$"):
        load_text_model(tmp_path / "run" / "checkpoints" / "step_2")


def test_sample_of_an_exported_adapter_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is an adapter; give its run, or what checkpoint exp"):
        load_text_model(tmp_path)
