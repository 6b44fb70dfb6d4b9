"""The README, word for word: every command runs, every shown error is what one sees."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import served
from command import Served
from served import Server

README = (Path(__file__).parent.parent / "README.md").read_text()
BIN = Path(sys.executable).parent
MAIN_JOB = "axonlaunch train +strategy=fsdp"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("axonlaunch ")]


def shortened(command: str) -> list[str]:
    """The words of a command, with as much less to do as shows the same.

    A run does a fifth of the steps that the page asks for, so that one goes on from another's.
    """
    words = shlex.split(command)
    narrow = ["model.hidden_size=32", "model.num_attention_heads=2", "data.sequence_length=64"]
    if words[1] == "verify":
        return [*words, *narrow, "--steps=1"]
    small = ["model.num_hidden_layers=2", "data.sequence_length=64"]
    if words[1] == "estimate":
        return [*words, *small]
    if words[1] == "plan":
        one = ["data_parallel=ddp", "tensor.degree=8", "pipeline.degree=1"]
        rest = ["train.micro_batch_size=1", "train.activation_checkpointing=full"]
        return [*words, *small, *(f"strategy.{key}" for key in one), *rest]
    if words[1] != "train":
        return words
    if "strategy=auto" in words:  # a few layouts to search
        words += ["strategy.data_parallel=ddp", "strategy.pipeline.degree=1"]
        words += ["strategy.tensor.degree=1", "train.activation_checkpointing=none"]
    given = dict(word.split("=", 1) for word in words if word.startswith("train.steps="))
    steps = int(given.get("train.steps", 20)) // 5
    words = [word for word in words if not word.startswith("train.steps=")]
    if not any(word.startswith("model=") for word in words):
        words += narrow
    return [*words, f"train.steps={steps}", "train.eval_batches=1", "sample.max_new_tokens=4"]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )


@pytest.mark.timeout(400)
def test_every_command_runs_in_the_order_of_the_page(tmp_path: Path, server: Server) -> None:
    axonlaunch = Served(tmp_path, server)
    (tmp_path / "README.md").write_text(README)
    for block in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    assert len(commands()) >= 10
    for command in commands():
        if command == MAIN_JOB:
            ran = run(shortened(command), tmp_path)
            assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
        else:
            differs = command.startswith("axonlaunch checkpoint diff ")  # two other runs
            axonlaunch(*shortened(command)[1:], status=int(differs))


def test_the_python_of_the_page_runs(tmp_path: Path, server: Server) -> None:
    scripts = [block for block in blocks("python") if "World" in block]
    assert len(scripts) == 1
    (tmp_path / "script.py").write_text(scripts[0])
    words = (served.script, "script.py")
    ran = served.Forked(*words, folder=tmp_path, environment=dict(os.environ))
    _, errors = ran.communicate(timeout=60)
    assert ran.returncode == 0, errors


def test_the_errors_of_the_page_are_what_one_sees(tmp_path: Path) -> None:
    shown = [block for block in blocks("text") if block.startswith("$ ") and "error:" in block]
    assert shown
    for block in shown:
        command, _, expected = block.removeprefix("$ ").partition("\n")
        ran = run(shlex.split(command), tmp_path)
        assert ran.returncode == 2
        assert ran.stderr == expected


def test_every_strategy_of_the_page_is_an_option_and_every_option_is_on_the_page() -> None:
    from axonlaunch.config import Composer

    listed = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    assert listed == set(Composer().options("strategy"))
