"""``axonlaunch train --dry-run``: its output, and the same exit status as the launch."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from support.command import TINY, Command
from support.launchers import have_sbatch

from axonlaunch.config import load, with_values
from axonlaunch.launch.commands import dry_run
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.runs import Run
from axonlaunch.system.storage.files import folder_lock


@pytest.mark.slow
def test_dry_run_starts_nothing_and_suggests_fitting_settings(axonlaunch: Command) -> None:
    small = ["hardware=cpu", "hardware.memory_gib=0.0013"]
    ran = axonlaunch.train("strategy=single", *small, "--dry-run")
    assert "single: 1 rank" in ran.stdout
    assert "does not fit" in ran.stdout
    assert "\ntrain.micro_batch_size=" in ran.stdout
    assert ran.stderr == ""
    small[1] = "hardware.memory_gib=1"
    fitting = axonlaunch.train("strategy=single", *small, "--dry-run").stdout
    assert "fits " in fitting
    assert "This node passes all checks before a launch." in fitting
    assert not (axonlaunch.folder / "runs").exists()


@pytest.mark.slow
def test_dry_run_prints_estimate_before_too_large_error(
    axonlaunch: Command,
) -> None:
    overrides = ["strategy=fsdp", "model=llama3_8b", "model.num_hidden_layers=2"]
    overrides += ["model.vocab_size=40000000", "data=tokens", "data.path=tokens.bin"]
    overrides += ["checkpoint.every=0"]
    ran = axonlaunch("train", "--dry-run", *overrides, status=2)
    table, _, rest = ran.stdout.partition("This node cannot run it:\n")
    assert "8,192 positions, bf16, selective" in " ".join(table.split())
    assert "highest peak" in table
    said = " ".join(rest.split())
    assert "data.path=tokens.bin: no such file" in said
    assert "model=llama3_8b: 328B parameters" in said
    assert "use a smaller model, more ranks with strategy=fsdp" in said
    assert "Add hardware=h100_80gb" in said
    assert rest.splitlines()[-1] == f"  axonlaunch estimate {' '.join(overrides)}"
    reported = json.loads(axonlaunch("train", "--dry-run", *overrides, "--json", status=2).stdout)
    assert [obstacle["key"] for obstacle in reported["obstacles"]] == ["data.path", "model"]
    assert reported["fits"] is reported["verdict"] is None


def test_dry_run_names_missing_data_after_the_estimate(axonlaunch: Command) -> None:
    overrides = [*(word for word in TINY if not word.startswith("data")), "data=tokens"]
    ran = axonlaunch("train", "--dry-run", *overrides, "data.sequence_length=16", status=2)
    assert "highest peak" in ran.stdout
    assert "data.path" in ran.stdout.partition("This node cannot run it")[2]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["run_dir=file/run", "launch.master_port={taken}"], ["run_dir", "launch.master_port"]),
        (["run_dir=run", "train.steps=3"], ["train.steps"]),
        (*(["launch=slurm", "launch.backend=mock"], ["launch.backend"]),),
        (["launch.nnodes=2", "launch.node_rank=0"], ["launch.master_addr"]),
        (["launch=env"], ["launch.name"]),
    ],
)
def test_a_dry_run_reports_and_exits_as_the_launch_would(
    axonlaunch: Command,
    overrides: list[str],
    keys: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_sbatch(axonlaunch.folder, monkeypatch)
    (axonlaunch.folder / "file").touch()
    (axonlaunch.folder / "run").mkdir()
    (axonlaunch.folder / "run/config.yaml").write_text("seed: 7")
    (axonlaunch.folder / "run/summary.json").write_text('{"status": "done", "steps": 3}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ["strategy=ddp", "launch.nproc=2", *(o.format(taken=port) for o in overrides)]
        launched = axonlaunch.train(*command, "--json", status=2)
        dry = axonlaunch.train(*command, "--json", "--dry-run", status=2)
    refused, reported = json.loads(launched.stdout), json.loads(dry.stdout)
    assert [error["key"] for error in refused["errors"]] == keys
    assert reported.get("obstacles", reported.get("errors")) == refused["errors"]


def test_a_dry_run_of_a_finished_run_says_that_nothing_is_left(axonlaunch: Command) -> None:
    (axonlaunch.folder / "run").mkdir()
    (axonlaunch.folder / "run/summary.json").write_text('{"status": "done", "steps": 6}')
    dry = axonlaunch.train("strategy=single", "run_dir=run", "--dry-run")
    assert dry.stdout.endswith("to start over, use another name or checkpoint.overwrite=true\n")


def test_dry_run_of_finished_epochs_says_that_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of a launch resolve the number of steps."""
    (tmp_path / "summary.json").write_text('{"status": "done", "steps": 6}')
    monkeypatch.setattr(
        dry_run,
        "check_function",
        lambda config: lambda config, options: with_values(config, {"train.steps": 6}),
    )
    monkeypatch.setattr(dry_run, "resolve_for_node", lambda context, config: config)
    for name in ("_estimate", "preview_proof"):
        monkeypatch.setattr(dry_run, name, lambda context, config: None)
    server: Any = None
    options = LaunchOptions(fork_server=server, started=0.0, dry_run=True)
    config = load([f"run_dir={tmp_path}", "train.steps=9"])
    run = Run(overrides=[], composed=None, config=config, options=options)
    assert "it has trained all of its 6 steps" in dry_run._dry_run(run, missing=[]).finished


def test_dry_run_in_the_folder_of_another_process_may_succeed_later(axonlaunch: Command) -> None:
    logs = axonlaunch.folder / "run/logs"
    logs.mkdir(parents=True)
    with folder_lock(logs):
        dry = axonlaunch.train("strategy=single", "run_dir=run", "--dry-run", status=75)
    assert "another process is training in" in dry.stdout


def test_dry_run_of_impossible_configuration_is_refused(axonlaunch: Command) -> None:
    ran = axonlaunch.train("strategy=tensor", "launch.nproc=7", "--dry-run", status=2)
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: strategy.tensor.degree=2: 7 ranks are not")
