"""Completion of commands, options, settings, values and runs: the words, and the shells."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.run_folders import run_folder

from axonlaunch.cli.app import app
from axonlaunch.cli.configuration.completion import completions
from axonlaunch.cli.configuration.keys_and_values import keys_and_values

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
        ("axonlaunch init --from ", ["chat", "custom", "documents", "image"]),
        ("axonlaunch init --from=c", ["--from=chat", "--from=custom"]),
        ("axonlaunch verify --reference f", ["fp64"]),
        ("axonlaunch checkpoint export runs/a --format ", ["safetensors"]),
        ("axonlaunch checkpoint export runs/a --dtype b", ["bf16"]),
        ("axonlaunch ls strat", ["strategies"]),
        ("axonlaunch train --config c", []),
        ("axonlaunch init folder --from cu", ["custom"]),
        ("axonlaunch init folder ", []),
        ("axonlaunch nothing ", []),
    ],
)
def test_line_is_completed(line: str, words: list[str]) -> None:
    assert completions(line, ROOT) == words


def test_keys_are_cached_until_something_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listed = keys_and_values()
    [file] = tmp_path.glob("*/completion-*.json")
    file.write_text(file.read_text().replace("optimizer.lr", "optimizer.from_the_cache"))
    assert "optimizer.from_the_cache" in keys_and_values()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert "optimizer.from_the_cache" in keys_and_values()
    (tmp_path / "site-packages").mkdir()
    assert keys_and_values() == listed


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
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
}
BEGIN = {
    "bash": "bind 'set bell-style none'",
    "zsh": "autoload -U compinit && compinit -u -D",
}
STUB = """#!/bin/sh
if [ "$1" = completion ]; then exec {python} -m axonlaunch "$@"; fi
printf 'ran <%s>\\n' "$*"
"""
"""Completes like the command, but prints its arguments in place of all other work."""


class Terminal:
    """An interactive shell in a pseudo-terminal."""

    def __init__(self, shell: str, folder: Path) -> None:
        stub = folder / "bin/axonlaunch"
        stub.parent.mkdir()
        stub.write_text(STUB.format(python=sys.executable))
        stub.chmod(0o755)
        ours, terminal = os.openpty()
        self._terminal = ours
        self._process = subprocess.Popen(
            [shell, *SHELLS[shell]],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=folder,
            env={**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}", "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(terminal)
        self._text = ""

    def send(self, text: str) -> None:
        """Press the keys of a text."""
        os.write(self._terminal, text.encode())

    def read_until(self, pattern: str) -> str:
        """Return the first match in the new output; wait for it up to a minute."""
        deadline = time.monotonic() + 60
        while (found := re.search(pattern, self._text)) is None:
            left = deadline - time.monotonic()
            assert left > 0, self._text
            if select.select([self._terminal], [], [], left)[0]:
                self._text += os.read(self._terminal, 4096).decode(errors="replace")
        self._text = self._text[found.end() :]
        return found[0]

    def close(self) -> None:
        """End the shell."""
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """Yield a shell in which the completion of the command is loaded."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    run_folder(tmp_path / "runs/one")
    (tmp_path / "mine.yaml").touch()
    terminal = Terminal(request.param, tmp_path)
    terminal.send(f"{BEGIN[request.param]}\n")
    terminal.send(f'eval "$(axonlaunch completion {request.param})"; echo read"y"\n')
    terminal.read_until("ready")
    yield terminal
    terminal.close()


@pytest.mark.slow
@pytest.mark.processes
def test_tab_completes_commands_options_keys_values_runs_and_files(shell: Terminal) -> None:
    """Keys leave the cursor behind ``=``; complete words are followed by a space."""
    for typed, ran in [
        ("tra\tx", "train x"),
        ("train --dr\tx", "train --dry-run x"),
        ("train optimizer.weight\t0.1", "train optimizer.weight_decay=0.1"),
        ("train seed=1 train.compile=t\t", "train seed=1 train.compile=true"),
        ("train +strategy=hyb\t", "train +strategy=hybrid"),
        ("report ru\t", "report runs/one"),
        ("train --config mi\t", "train --config mine.yaml"),
        ("init --from doc\t", "init --from documents"),
    ]:
        shell.send(f"axonlaunch {typed}")
        shell.send("\n")
        assert shell.read_until(r"ran <[^>]*>") == f"ran <{ran}>"


@pytest.mark.slow
@pytest.mark.processes
def test_tab_lists_the_words_that_complete_an_ambiguous_one(shell: Terminal) -> None:
    shell.send("axonlaunch train strategy=h\t\t")
    shell.read_until("hsdp")
    shell.read_until("hybrid")
