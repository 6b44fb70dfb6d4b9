"""The launcher that starts the runs of a command, and the options that it refuses."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest

from axonlaunch.config import ConfigError, load
from axonlaunch.config.composition.hydra_files import HydraFiles
from axonlaunch.launch import runs
from axonlaunch.launch.cluster_environment import ClusterEnvironment
from axonlaunch.launch.commands.request import Request
from axonlaunch.launch.launcher import (
    LaunchOptions,
    check_function,
    launch_function,
    launcher_of,
)
from axonlaunch.launch.runs import Run, prepare_runs

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
    ("overrides", "name"),
    [([], "local"), (["launch=local"], "local"), (NODES, "multinode"), (SLURM, "slurm")],
)
def test_each_configuration_has_one_launcher(overrides: list[str], name: str) -> None:
    config = load(overrides)
    assert launcher_of(config) == name
    assert callable(check_function(config))
    assert callable(launch_function(config))


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
    [run] = runs.load_runs(request, environment.of_node(), options)
    assert run.config.plugins == ["json"]
    assert run.config.launch.nnodes == (2 if variables else 1)
    assert run.composed is not None
    assert run.composed.origins()["launch.nproc"] == "override launch.nproc=2"
    assert len(composed) == 1
