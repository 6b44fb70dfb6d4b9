"""The imports of the fork server depend on the overrides."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest

from axonlaunch.cli.shared.early_server import early_server
from axonlaunch.config import load
from axonlaunch.launch.local.preload_rules import preloads, preloads_of_config
from axonlaunch.system.processes import forkserver

MODULE = "axonlaunch.models.hf.reading.preload"
COMPILER = "axonlaunch.planning.tracing.preload"


@pytest.mark.parametrize("word", ["model=hf", "+model=hf", "model.name=hf"])
def test_a_model_of_transformers_is_imported_for_all_ranks_at_once(word: str) -> None:
    assert preloads(["strategy=fsdp", word], traces=False) == [MODULE]


@pytest.mark.parametrize(
    "word",
    [
        "train.compile=true",
        "train.deterministic=true",
        "strategy=pipeline",
        "+strategy=hybrid",
        "strategy.pipeline.degree=2",
        "strategy=auto",
    ],
)
def test_the_compiler_is_imported_for_all_ranks_at_once_by_runs_that_use_it(word: str) -> None:
    assert preloads(["model=gpt", word], traces=False) == [COMPILER]
    config = load(["model=gpt", "launch.nproc=4", word])
    assert preloads_of_config(config, traces=config.strategy.auto) == [COMPILER]


@pytest.mark.parametrize("line", ["estimate", "plan", "verify", "train --dry-run"])
def test_the_compiler_is_imported_once_by_commands_that_trace_a_step(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(
        forkserver, "warm", lambda *, preload: started.append(preload) or nullcontext()
    )
    with early_server([*line.split(), "strategy=fsdp"]):
        assert started == [[COMPILER]]


@pytest.mark.slow
def test_preload_imports_transformers_models() -> None:
    code = f"import sys, {MODULE}; print('transformers.modeling_utils' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


@pytest.mark.parametrize("overrides", [None, [], ["model=gpt", "data=text"]])
def test_other_models_import_no_more_than_before(overrides: list[str] | None) -> None:
    assert preloads(overrides, traces=False) == []
    assert preloads_of_config(load(["model=gpt"]), traces=False) == []


@pytest.mark.parametrize(
    ("line", "variables", "starts"),
    [
        ("train strategy=fsdp", {}, True),
        ("plan", {}, True),
        ("train strategy=ddp", {"LOCAL_RANK": "1"}, False),
        ("train --help", {}, False),
        ("ls models", {}, False),
        ("", {}, False),
    ],
)
def test_the_server_is_started_first_where_the_command_needs_it(
    line: str, variables: dict[str, str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(
        forkserver, "warm", lambda *, preload: started.append(preload) or nullcontext()
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with early_server(line.split()):
        assert bool(started) is starts
