"""An untrusted run can be inspected and used; its code runs only if the user trusts it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import Served
from support.served import Server

from axonlaunch import config
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.format import step_folders
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import to_tree, to_yaml
from axonlaunch.system.storage.cache import cache_folder
from axonlaunch.system.storage.trusted_files import is_trusted, mark_trusted

EVIL = """
from pathlib import Path
from torch import nn

Path(__file__).with_name("victim").write_text("it ran")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def build():
    return Model()
"""
OVERRIDES = {
    "check": ["checkpoint", "check", "foreign"],
    "export": ["checkpoint", "export", "foreign", "out"],
    "sample": ["sample", "foreign", "--tokens", "3"],
}
NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "a plugin": ({"plugins": ["evil"]}, "plugins=evil: would import it"),
    "a target": (
        {"model": {"name": "custom", "target": "evil:build"}},
        "model.target=evil:build: would import and call it",
    ),
    "a dataset": (
        {"data": {"name": "custom", "target": "evil:build"}},
        "data.target=evil:build: would import and call it",
    ),
    "a logger": (
        {"loggers": [{"name": "tensorboard"}, {"name": "custom", "target": "evil:build"}]},
        "loggers[1].target=evil:build: would import and call it",
    ),
    "remote code": (
        {"model": {"name": "gpt", "trust_remote_code": True}},
        "model.trust_remote_code=true: would run code that comes with the model",
    ),
}


@pytest.fixture
def foreign(tmp_path: Path, server: Server) -> Served:
    """Return a folder with another user's run of a small model, and the module of its code."""
    run_dir = tmp_path / "foreign"

    def on_rank(world: World) -> None:
        saver = Saver(run_dir, world=world, retention=Retention(newest=1))
        model = {"embedding.weight": torch.ones(256, 8), "head.weight": torch.ones(256, 8)}
        saver.save({"model": {**model, "head.bias": torch.ones(256)}}, step=1, samples=1)

    World.mock(1).run(on_rank)
    (tmp_path / "evil.py").write_text(EVIL)
    return Served(tmp_path, server)


def freeze(foreign: Served, **changed: Any) -> Path:
    """Write the run's configuration."""
    tree = {**to_tree(config.load(["strategy=single", "name=foreign"])), **changed}
    file = foreign.folder / "foreign" / "config.yaml"
    file.write_text(to_yaml(tree))
    return file


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("overrides", OVERRIDES)
def test_a_foreign_configuration_s_code_does_not_run(
    overrides: str, named: str, foreign: Served
) -> None:
    changed, reported = NAMED[named]
    text = freeze(foreign, **changed).read_text()
    ran = foreign(*OVERRIDES[overrides], status=2)
    [error] = ran.stderr.splitlines()
    key = reported.partition("=")[0].rpartition(".")[2]
    [line] = [n for n, row in enumerate(text.splitlines(), 1) if row.strip().startswith(f"{key}:")]
    assert error == (
        f"error: foreign/config.yaml:{line}: {reported}; add --trust if you trust who wrote it"
    )
    assert not (foreign.folder / "victim").exists()
    assert not (foreign.folder / "out").exists()


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_trusted_foreign_run_executes_code(overrides: str, foreign: Served) -> None:
    freeze(foreign, plugins=["evil"], model=NAMED["a target"][0]["model"])
    foreign(*OVERRIDES[overrides], "--trust")
    assert (foreign.folder / "victim").exists()


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("model.name", {"model": {"name": "announced"}}),
        ("data.name", {"data": {"name": "announced"}}),
        ("optimizer.name", {"optimizer": {"name": "announced"}}),
        ("loggers[0].name", {"loggers": [{"name": "announced"}]}),
        ("launch.name", {"launch": {"name": "announced"}}),
        ("strategy.data_parallel", {"strategy": {"data_parallel": "announced"}}),
    ],
)
def test_entry_points_of_foreign_runs_need_trust(
    key: str, changed: dict[str, Any], foreign: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    from axonlaunch.config.schema import REGISTRIES

    registry = REGISTRIES[key.partition("[")[0].removesuffix(".name")]
    point = EntryPoint("announced", "evil", "axonlaunch.any")
    monkeypatch.setattr(registry, "offers", lambda name=None: [point])
    file = freeze(foreign, **changed)
    would = f"{key}=announced: would import evil, of an installed package"
    with pytest.raises(config.ConfigError, match=re.escape(would)):
        config.read_frozen(file.parent)


@pytest.mark.parametrize("overrides", [["ls", "foreign"], ["diff", "foreign", "foreign"]])
def test_commands_without_model_need_no_trust(overrides: list[str], foreign: Served) -> None:
    freeze(foreign, plugins=["evil"])
    foreign("checkpoint", *overrides)
    assert not (foreign.folder / "victim").exists()


def test_loading_foreign_weights_runs_no_code(foreign: Served) -> None:
    freeze(foreign, plugins=["evil"], model={"name": "custom", "target": "evil:build"})
    ran = foreign.train("name=mine", "model.weights=foreign", status=2)
    assert "model.weights=foreign: they were saved with a different model" in ran.stderr
    assert not (foreign.folder / "victim").exists()


def test_import_runs_no_code_named_in_config_json(foreign: Served) -> None:
    folder = foreign.folder / "hub"
    folder.mkdir()
    auto = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.build"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    (folder / "evil.py").write_text(EVIL)
    ran = foreign("checkpoint", "import", "hub", "mine", status=2)
    assert ran.stderr.startswith("error: hub/config.json: is of a model of transformers; use")
    assert not (folder / "victim").exists()


BOMBS = {
    "an alias bomb": (
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "holds more than 100000 values, aliases counted in full",
    ),
    "a recursive alias": ("a: &a [*a]\n", "the alias *a stands for something that holds it"),
    "deep": ("a: " + "{" * 15_000, "is nested deeper than 64 levels"),
    "deep lists": ("a: " + "[" * 15_000, "is nested deeper than 64 levels"),
    "large": ("a: " + "x" * (1 << 20), "can't be read: is larger than 1048576 bytes"),
    "a tag": ("a: !!python/object/apply:os.system ['touch victim']", "not YAML: "),
    "no keys": ("3", "holds no keys"),
    "bad bytes": (b"\xff\xfe\x00a", "can't be read: "),
    "a list of keys": ("? [a, b]\n: 3\n", "not YAML: "),
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_for_a_configuration_is_one_line(bomb: str, foreign: Served) -> None:
    content, reported = BOMBS[bomb]
    file = freeze(foreign)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    ran = foreign("checkpoint", "check", "foreign", status=2)
    [error] = ran.stderr.splitlines()
    assert error.startswith(f"error: foreign/config.yaml: {reported}")
    foreign("checkpoint", "ls", "foreign")


def test_checkpoints_are_found_next_to_a_yaml_bomb(foreign: Served) -> None:
    """``checkpoints_parent`` reads a configuration only if there is no folder of checkpoints."""
    (foreign.folder / "foreign" / "checkpoints").rename(foreign.folder / "aside")
    freeze(foreign).write_text(BOMBS["an alias bomb"][0])
    assert step_folders.latest(foreign.folder / "foreign") is None


@pytest.mark.parametrize("kind", ["a link", "a FIFO"])
def test_a_configuration_that_is_no_file_is_refused(kind: str, foreign: Served) -> None:
    import os

    file = freeze(foreign)
    aside = file.rename(foreign.folder / "aside.yaml")
    file.symlink_to(aside) if kind == "a link" else os.mkfifo(file)
    ran = foreign("sample", "foreign", status=2)
    assert ran.stderr == "error: foreign/config.yaml: can't be read: is not a regular file\n"


def test_the_layout_that_a_manifest_reports_can_not_write_to_the_terminal(foreign: Served) -> None:
    from axonlaunch.checkpoint.format import manifest

    folder = foreign.folder / "foreign/checkpoints/step_1"
    about = json.loads((folder / "manifest.json").read_text())
    about["layout"] = "[red]x[/red]"
    about["sha256"] = manifest._own_sum(about)
    (folder / "manifest.json").write_text(json.dumps(about))
    assert "[red]x[/red]" in foreign("checkpoint", "ls", "foreign").stdout
    about["layout"] = "\x1b]0;title\x07"
    about["sha256"] = manifest._own_sum(about)
    (folder / "manifest.json").write_text(json.dumps(about))
    ran = foreign("checkpoint", "ls", "foreign")
    assert "has a manifest.json that can't be understood" in ran.stdout
    assert "\x1b" not in ran.stdout


def test_a_value_of_a_configuration_can_not_write_to_the_terminal(foreign: Served) -> None:
    freeze(foreign, seed="\x1b]0;title\x07")
    ran = foreign("checkpoint", "check", "foreign", status=2)
    assert "seed=\\x1b]0;title\\x07: expected" in ran.stderr


def test_your_run_needs_no_trust(foreign: Served) -> None:
    overrides = ["model=custom", "model.target=evil:build", "data.sequence_length=16"]
    foreign("train", *overrides, "name=mine", "train.steps=1", "launch.backend=mock")
    exported = foreign("checkpoint", "export", "runs/mine", "out").stdout
    assert "out/model.safetensors\n" in exported
    file = foreign.folder / "runs/mine/config.yaml"
    file.write_text(file.read_text() + "\n")
    refused = foreign("checkpoint", "export", "runs/mine", "again", status=2).stderr
    assert "model.target=evil:build: would import and call it" in refused


def test_a_mark_holds_for_one_content_folder_and_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "config.yaml"
    file.write_text("plugins: [mine]\n")
    assert not is_trusted(file, file.read_text())
    mark_trusted(file, file.read_text())
    assert is_trusted(file, file.read_text())
    assert not is_trusted(file, "plugins: [evil]\n")
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    assert not is_trusted(tmp_path / "copied" / "config.yaml", file.read_text())
    monkeypatch.chdir(tmp_path / "copied")  # has other modules
    assert not is_trusted(file, file.read_text())
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as other_user:
        other_user.setattr("os.geteuid", lambda: 12345)
        assert not is_trusted(file, file.read_text())
    [key] = cache_folder().glob("*.key")
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o640)
    assert not is_trusted(file, file.read_text())
    key.unlink()
    assert not is_trusted(file, file.read_text())
