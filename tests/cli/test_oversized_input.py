"""Input that is too large, too deep or not a number is a one-line error, exit status 2, at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.command import Served
from support.served import Server

from axonlaunch import config
from axonlaunch.checkpoint.exchange.weights import describe_folder
from axonlaunch.config import ConfigError


@pytest.fixture
def served(tmp_path: Path, server: Server) -> Served:
    return Served(tmp_path, server)


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        (["tokenizer.path=" + "ab " * 20_000], "tokenizer.path=ab ab ab ab ab "),
        (["name=" + "x" * 60_000], "name=xxxxxxxxxxxxxxxxxxxx"),
        (["name=" + "x" * 300], "name=xxxxxxxxxxxxxxxxxxxx"),
        (["name=" + "x/" * 3000], "name=x/x/x/x/x/"),
        (["model.arguments=" + "{" * 15_000], "model.arguments={{{{{{{{{{"),
        (["model.arguments=" + "{a:" * 500 + "1" + "}" * 500], "model.arguments={a:{a:{a:"),
        (["data.files=" + "[" * 3000 + "]" * 3000], "data.files=[[[[[[[[[[[[["),
        (
            ["model.num_hidden_layers=1000000000"],
            "model.num_hidden_layers=1000000000: must be at m",
        ),
    ],
    ids=["long", "long name", "a name of 300", "a long path", "15000", "500", "lists", "layers"],
)
def test_an_override_is_refused_in_a_line(overrides: list[str], reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(overrides)
    [line] = str(caught.value).splitlines()
    assert line.startswith(reported)
    assert len(line) < 500


def test_brackets_in_quotes_are_not_nested() -> None:
    field = "(" * 100
    chosen = config.load(["data=documents", "data.files=[a]", f"data.text_field='{field}'"])
    assert chosen.data.text_field == field


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers=1000000000: must be at most 10"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers=2: expected a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers=null: expected"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1: must be at least 1"),
        ({"hidden_size": [1]}, "hidden_size=[1]: expected"),
        ({"num_attention_heads": 0}, ""),
        ({"hidden_size": 1e400}, "hidden_size=inf: expected"),
        ({"name": "custom", "target": "evil:build"}, "is of model=custom; only gpt, llama, moe"),
    ],
)
def test_invalid_settings_of_an_exported_model_are_refused(
    settings: dict[str, object], reported: str, tmp_path: Path
) -> None:
    content = {"name": "gpt", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**content, **settings}))
    with pytest.raises(ConfigError) as caught:
        describe_folder(tmp_path)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path}/config.json: ")
    assert reported in line


@pytest.mark.parametrize("text", ["3", "null", "[" * 15_000, "{", '{"model_type": ["gpt2"]}', "\0"])
def test_a_config_json_that_is_something_else_is_refused(text: str, served: Served) -> None:
    folder = served.folder / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    ran = served("checkpoint", "import", "hub", "mine", status=2)
    [error] = ran.stderr.splitlines()
    assert error.startswith("error: hub/config.json: ")
    assert not (served.folder / "mine").exists()


def test_a_foreign_model_of_more_layers_than_it_has_weights_is_refused(served: Served) -> None:
    folder = served.folder / "hub"
    folder.mkdir()
    settings = {"name": "gpt", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 200}))
    save_file({"embed_tokens.weight": torch.ones(8, 8)}, folder / "model.safetensors")
    ran = served("checkpoint", "import", "hub", "mine", status=2)
    assert "is missing; " in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
