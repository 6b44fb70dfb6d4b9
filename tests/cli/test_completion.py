"""Completion of commands, options, settings, values and runs, in the shells and without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from run_folders import run_folder

from axonlaunch.cli.app import app
from axonlaunch.cli.configuration.completion import completions

ROOT: Any = typer.main.get_command(app)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("axonlaunch tr", ["train"]),
        ("axonlaunch checkpoint e", ["export"]),
        ("axonlaunch train --dr", ["--dry-run"]),
        ("axonlaunch help strat", ["strategies"]),
        ("axonlaunch train optim", ["optimizer.", "optimizer="]),
        ("axonlaunch train -m +strategy=h", ["+strategy=hsdp", "+strategy=hybrid"]),
        ("axonlaunch train x=1 train.prec", ["train.precision="]),
        ("axonlaunch train train.compile=", ["train.compile=false", "train.compile=true"]),
        ("axonlaunch train strategy.tensor.deg", ["strategy.tensor.degree="]),
        ("axonlaunch nothing ", []),
    ],
)
def test_line_is_completed(line: str, words: list[str]) -> None:
    assert completions(line, ROOT) == words


def test_names_of_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs/one")
    run_folder(tmp_path / "runs/sweep/0")
    assert completions("axonlaunch report ", ROOT) == ["runs/one", "runs/sweep/0"]
    assert completions("axonlaunch checkpoint export runs/s", ROOT) == ["runs/sweep/0"]
    assert completions("axonlaunch train checkpoint.resume=runs/o", ROOT) == [
        "checkpoint.resume=runs/one"
    ]


SHELLS = {
    "bash": """
        eval "$(axonlaunch completion bash)"
        COMP_LINE='axonlaunch train train.compile=t' COMP_POINT=32
        _axonlaunch; printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { : } ; compadd() { print -r -- "${@[-1]}" }
        eval "$(axonlaunch completion zsh)"
        words=(axonlaunch train train.compile=t) CURRENT=3 PREFIX=train.compile=t
        _axonlaunch
    """,
}


@pytest.mark.parametrize(("shell", "word"), [("bash", "true"), ("zsh", "train.compile=true")])
def test_script_of_a_shell_completes_a_value(shell: str, word: str, tmp_path: Path) -> None:
    """In bash only the part after ``=`` is inserted, because it separates words there."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "axonlaunch").write_text(f'#!/bin/sh\nexec {sys.executable} -m axonlaunch "$@"\n')
    (tmp_path / "axonlaunch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    options = ["--norc"] if shell == "bash" else ["-f"]
    ran = subprocess.run(
        [shell, *options, "-c", SHELLS[shell]],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=90,
    )
    assert ran.stdout.split() == [word], ran.stderr
