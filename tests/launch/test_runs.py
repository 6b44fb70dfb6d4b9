"""Which launcher starts the runs of a command, and the options that it refuses."""

from __future__ import annotations

import multiprocessing

import pytest

from axonlaunch.config import ConfigError, load
from axonlaunch.config.composition.hydra_files import HydraFiles
from axonlaunch.launch.cluster_environment import ClusterEnvironment
from axonlaunch.launch.launcher import (
    LaunchOptions,
    check_function,
    launch_function,
    launcher_of,
)
from axonlaunch.launch.runs import Request, Runs

SLURM = ["launch=slurm", "launch.nproc=2"]
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
        ([[]], True, "launch.name=auto: --render prints the script of a SLURM job; use slurm"),
    ],
)
def test_unsupported_launcher_options_are_refused_first(
    batches: list[list[str]], render: bool, problem: str
) -> None:
    context = multiprocessing.get_context("forkserver")
    options = LaunchOptions(context=context, started=0.0, render=render)
    runs = Runs([(batch, load(batch)) for batch in batches], options)
    with pytest.raises(ConfigError) as raised:
        next(iter(runs))
    [issue] = raised.value.problems
    assert str(issue).startswith(problem)


def test_a_run_is_composed_once_from_the_command_line_to_its_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composed: list[object] = []
    compose = HydraFiles.compose
    monkeypatch.setattr(
        HydraFiles, "compose", lambda *args: composed.append(args) or compose(*args)
    )
    options = LaunchOptions(context=multiprocessing.get_context("forkserver"), started=0.0)
    request = Request(overrides=["plugins=[json]", "launch.nproc=2"])
    runs = Runs.load(request, ClusterEnvironment.detect({}), options)
    [(_, config)] = runs.loaded
    assert config.plugins == ["json"]
    assert runs.composed[0].origins()["launch.nproc"] == "override launch.nproc=2"
    assert len(composed) == 1
