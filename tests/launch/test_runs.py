"""The launcher that starts the runs of a command, and the options that it refuses."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from functools import partial
from pathlib import Path

import pytest
import torch

from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig, load, to_yaml, with_values
from axonlaunch.config.composition.hydra_files import HydraFiles
from axonlaunch.config.options.launch import LAUNCHERS
from axonlaunch.launch import runs
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.external.kubernetes.checks import with_folder_of_pods
from axonlaunch.launch.launcher import (
    LaunchOptions,
    check_function,
    launch_function,
    launcher_of,
)
from axonlaunch.launch.request import Request
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.launch.run_folder.names import with_run_dir
from axonlaunch.launch.runs import Run, load_runs, prepare_runs

SLURM = ["launch=slurm", "launch.nproc=2"]
TASK_OF_NODE = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost,gpu7",
}
"""Variables of the first of two tasks, of which each starts the ranks of its node."""
NODES = ["launch.nproc=1", "launch.nnodes=2", "launch.master_addr=10.0.0.1"]


@pytest.mark.parametrize(
    ("override", "folder"),
    [("seed=0", None), ("run_dir=moved", "moved"), ("name=other", "{tmp}/other")],
)
def test_moved_run_is_continued_only_in_a_given_folder(
    override: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, moved = tmp_path / "first", tmp_path / "moved"
    first.mkdir()
    config = load(["strategy=single", "name=first", f"run_dir={first}"])
    (first / "config.yaml").write_text(to_yaml(config))
    (first / "events.jsonl").touch()
    options = LaunchOptions(fork_server=multiprocessing.get_context("forkserver"), started=0.0)
    environment = ClusterEnvironment.detect({}).for_node()
    request = Request(overrides=["first/config.yaml"])
    assert load_runs(request, environment, options)[0].config.run_dir == str(first)
    first.rename(moved)
    request = Request(overrides=["moved/config.yaml", override])
    if folder is None:
        error = rf"{first}: moved/config\.yaml was moved .* run_dir=moved, else run_dir={first}$"
        with pytest.raises(ConfigError, match=error):
            load_runs(request, environment, options)
    else:
        expected = folder.replace("{tmp}", str(tmp_path))
        assert load_runs(request, environment, options)[0].config.run_dir == expected


@pytest.mark.parametrize(
    ("overrides", "name"),
    [([], "local"), (["launch=local"], "local"), (NODES, "multinode"), (SLURM, "slurm")],
)
def test_each_configuration_has_one_launcher(overrides: list[str], name: str) -> None:
    config = load(overrides)
    assert launcher_of(config) == name
    assert callable(check_function(config))
    assert callable(launch_function(config))


@pytest.mark.parametrize(
    ("name", "folders"),
    [("slurm", ["runs/lr/0", "runs/lr/1"]), ("kubernetes", ["/runs/lr/0", "/runs/lr/1"])],
)
def test_runs_of_a_sweep_have_numbered_folders_where_the_launcher_keeps_them(
    name: str, folders: list[str]
) -> None:
    words = [f"launch={name}", "name=lr", "launch.nproc=1", "optimizer.lr=1e-3,3e-3"]
    words.append("launch.kubernetes.volumes=['runs:/runs']")
    request = Request(overrides=words, multirun=True)
    options = LaunchOptions(fork_server=multiprocessing.get_context("forkserver"), started=0.0)
    environment = ClusterEnvironment.detect({}).for_node()
    configs = [run.config for run in load_runs(request, environment, options)]
    if name == "kubernetes":
        configs = [with_folder_of_pods(config) for config in configs]
    else:
        configs = [with_run_dir(config) for config in configs]
    assert [config.run_dir for config in configs] == [
        str(Path(folder).absolute()) for folder in folders
    ]
    assert [config.name for config in configs] == ["lr/0", "lr/1"]


@pytest.mark.parametrize(
    ("batches", "render", "problem"),
    [
        ([[], SLURM], False, "launch.name=slurm: all runs of a sweep need the same launcher; "),
        ([NODES, NODES], False, "launch.nnodes=2: a sweep runs on one node; use 1, or start "),
        (
            [[]],
            True,
            "launch.name=auto: --render prints what would be submitted; use slurm, kubernetes, "
            "skypilot or dstack",
        ),
        ([SLURM, SLURM], True, "launch.name=slurm: --render prints one job of slurm; print those "),
    ],
)
def test_unsupported_launcher_options_are_refused_first(
    batches: list[list[str]], render: bool, problem: str
) -> None:
    context = multiprocessing.get_context("forkserver")
    options = LaunchOptions(fork_server=context, started=0.0, render=render)
    sweep = [
        Run(overrides=batch, composed=None, config=load(batch), options=options)
        for batch in batches
    ]
    with pytest.raises(ConfigError) as raised:
        prepare_runs(sweep)
    [issue] = raised.value.problems
    assert str(issue).startswith(problem)


def test_a_launcher_that_launches_no_sweeps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = dataclasses.replace(LAUNCHERS.facts("slurm"), sweeps=False)
    monkeypatch.setattr(LAUNCHERS, "facts", lambda name: slurm)
    options = LaunchOptions(fork_server=multiprocessing.get_context("forkserver"), started=0.0)
    run = Run(overrides=SLURM, composed=None, config=load(SLURM), options=options)
    with pytest.raises(ConfigError, match="slurm: launches one run per command, not 2; "):
        prepare_runs([run, run])


@pytest.mark.parametrize("variables", [{}, TASK_OF_NODE], ids=["by hand", "a task per node"])
def test_a_run_is_composed_once_from_the_command_line_to_its_launch(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    composed: list[object] = []
    compose = HydraFiles.compose
    monkeypatch.setattr(
        HydraFiles, "compose", lambda *args: composed.append(args) or compose(*args)
    )
    options = LaunchOptions(fork_server=multiprocessing.get_context("forkserver"), started=0.0)
    request = Request(overrides=["plugins=[json]", "launch.nproc=2"])
    environment = ClusterEnvironment.detect(variables)
    assert not environment.is_rank(
        partial(request.compose, request.overrides), accelerators=pytest.fail
    )
    [run] = runs.load_runs(request, environment.for_node(), options)
    assert run.config.plugins == ["json"]
    assert run.config.launch.nnodes == (2 if variables else 1)
    assert run.composed is not None
    assert run.composed.origins()["launch.nproc"] == "override launch.nproc=2"
    assert len(composed) == 1


def write_finished_run(config: RunConfig, *, steps: int) -> None:
    """Write the files of a run that ended after some steps."""
    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(with_values(config, {"train.steps": steps})))
    (folder / "summary.json").write_text(json.dumps({"status": "done", "steps": steps}))


def named(tmp_path: Path, *overrides: str) -> RunConfig:
    return load(["name=run", f"run_dir={tmp_path / 'run'}", "strategy=single", *overrides])


def test_run_that_has_trained_its_epochs_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = named(tmp_path, "train.epochs=2")
    counted = with_values(config, {"train.steps": 7, "train.epochs": None})
    write_finished_run(counted, steps=7)
    monkeypatch.setattr(runs, "check_function", lambda config: lambda config, options: counted)
    options = LaunchOptions(fork_server=multiprocessing.get_context("forkserver"), started=0.0)
    [run] = prepare_runs([Run(overrides=[], composed=None, config=config, options=options)])
    assert run.finished == {"status": "done", "steps": 7}


def test_run_that_early_stopping_ended_is_finished(tmp_path: Path) -> None:
    config = named(tmp_path, "train.steps=20", "train.early_stop=2")
    write_finished_run(config, steps=4)

    def save(world: World) -> None:
        saver = Saver(Path(config.run_dir), world=world, retention=Retention(newest=1))
        saver.save({"model": {"w": torch.ones(1)}}, step=4, samples=4, evaluations_since=2)
        saver.close()

    World.mock(1).run(save)
    summary = finished_runs.finished_summary(config)
    assert summary is not None
    assert "train.early_stop=2 ended it after 4 steps; to continue, use more evaluations, or " in (
        finished_runs.finished_text(config, summary)
    )
    assert finished_runs.finished_summary(with_values(config, {"train.early_stop": 3})) is None


def test_finished_run_names_the_command_that_uploads_its_weights(tmp_path: Path) -> None:
    config = named(
        tmp_path, "train.steps=4", "checkpoint.push=me/x", "checkpoint.push_private=true"
    )
    write_finished_run(config, steps=4)
    summary = finished_runs.finished_summary(config)
    assert summary is not None
    command = f"axonlaunch checkpoint export {config.run_dir} --push me/x --private"
    assert finished_runs.finished_text(config, summary).endswith(
        f"to upload its weights, use {command}"
    )
    uploaded = {**summary, "pushed": "https://hub/me/x"}
    assert "upload" not in finished_runs.finished_text(config, uploaded)
