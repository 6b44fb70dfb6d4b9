"""Tests of the home folder, which a user of a container may not have."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from axonlaunch import config
from axonlaunch.config.composition.compose import Composer
from axonlaunch.system.storage.cache import cache_folder
from axonlaunch.system.storage.home import expand_home


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in /etc/passwd, as of ``docker run --user``."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567)


@pytest.mark.usefixtures("no_home")
def test_user_without_home_composes_a_configuration() -> None:
    tree = Composer().compose(["run_dir=~/r", "train.steps=3"]).tree
    assert (tree["run_dir"], tree["train"]["steps"]) == ("/r", 3)


@pytest.mark.usefixtures("no_home")
def test_cache_of_a_user_without_home_is_below_the_root() -> None:
    assert cache_folder() == Path("/.cache/axonlaunch")


def test_home_of_an_unknown_user_is_not_expanded() -> None:
    assert expand_home("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


def test_home_in_a_file_is_expanded_as_in_an_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.yaml").write_text("run_dir: ~/r\nplugins: [~/a]\noptimizer: mine\n")
    lines = ["~/env/setup", "source ~/env/x"]  # the shell of the node expands both
    with (tmp_path / "run.yaml").open("a") as file:
        file.write(f"launch: {{slurm: {{prologue: {json.dumps(lines)}}}}}\n")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("name: custom\ntarget: ~/b\n")
    composer = Composer(config_dirs=[tmp_path])
    composed = composer.compose([str(tmp_path / "run.yaml"), 'name="~/r"'])
    values = config.flatten(composed.tree)
    keys = ("run_dir", "plugins", "optimizer.target", "name")
    assert [values[key] for key in keys] == ["/home/me/r", ["/home/me/a"], "/home/me/b", "~/r"]
    assert values["launch.slurm.prologue"] == lines
