"""``axonlaunch init``: its projects train, are verified and fit the schema."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from support.command import Served
from support.served import Server

from axonlaunch.cli.configuration import init
from axonlaunch.config.values.plain_values import read_yaml

KINDS = ["custom", "documents", "image", "chat"]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_project_trains_and_is_verified(kind: str, tmp_path: Path, server: Server) -> None:
    if kind == "chat":
        pytest.importorskip("transformers")
    printed = Served(tmp_path, server)("init", "mine", "--from", kind).stdout
    assert printed.endswith("\nnext: cd mine && axonlaunch train run.yaml\n")
    project = Served(tmp_path / "mine", server)
    short = ["train.steps=2", "train.eval_every=0", "launch.nproc=2", "launch.backend=mock"]
    assert "done after step 2" in project("train", "run.yaml", *short).stdout
    [test] = [n for n in ast.parse(read(tmp_path, "test_project.py")).body if hasattr(n, "args")]
    assert "ax.load(['run.yaml', 'strategy=fsdp', 'launch.nproc=2'])" in ast.unparse(test)
    project("verify", "run.yaml", "strategy=fsdp", "launch.nproc=2", "--steps=2")


@pytest.mark.parametrize("kind", KINDS)
def test_project_has_a_readme_and_settings_that_are_valid_by_its_schema(
    kind: str, tmp_path: Path, server: Server
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    project = json.loads(Served(tmp_path, server)("init", "mine", "--from", kind, "--json").stdout)
    assert {*project["files"]} == {path.name for path in (tmp_path / "mine").iterdir()}
    text = read(tmp_path, "run.yaml")
    first = text.splitlines()[0]
    assert first == "# yaml-language-server: $schema=axonlaunch-schema.json"
    schema = json.loads(read(tmp_path, "axonlaunch-schema.json"))
    assert jsonschema.Draft202012Validator(schema).is_valid(read_yaml(text))
    readme = read(tmp_path, "README.md")
    for name in project["files"]:
        assert name == "README.md" or f"| `{name}` |" in readme
    assert f"axonlaunch report runs/{read_yaml(text)['name']} " in readme


def test_init_names_the_package_that_a_project_of_chats_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for kind, first in (("chat", "pip install 'axonlaunch[hf]' && cd chat"), ("image", "cd image")):
        init.command(Path(kind), kind)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"next: {first} && axonlaunch train run.yaml"


def test_init_refuses_to_overwrite_and_names_the_existing_file(
    tmp_path: Path, server: Server
) -> None:
    command = Served(tmp_path, server)
    (tmp_path / "run.yaml").write_text("mine")
    assert command("init", status=2).stderr == (
        "error: .: run.yaml exists there already; give another folder\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert "there is no project 'chats'; did you mean chat?" in (
        command("init", "mine", "--from", "chats", status=2).stderr
    )


def read(folder: Path, name: str) -> str:
    return (folder / "mine" / name).read_text()


def test_error_of_a_file_in_another_folder_says_where_to_start(
    tmp_path: Path, server: Server
) -> None:
    command = Served(tmp_path, server)
    command("init", "mine")
    error = command("config", "mine/run.yaml", status=2).stderr
    assert "and the installed packages; start in its folder: cd mine" in " ".join(error.split())
