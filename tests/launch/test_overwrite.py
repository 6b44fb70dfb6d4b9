"""``checkpoint.overwrite`` starts over in a run folder and keeps the run that was in it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from support.command import Command

from axonlaunch.config import ConfigError, RunConfig, compose, load, with_values
from axonlaunch.launch import runs
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.environment.environment_variables import LaunchIdentity
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.output.summary import resuming_command
from axonlaunch.launch.request import Request
from axonlaunch.launch.run_folder.open_folder import open_run_dir
from axonlaunch.system.storage.files import folder_lock

OVERWRITE, OFF = "checkpoint.overwrite=true", "checkpoint.overwrite=false"
JOB = {"SLURM_JOB_ID": "41"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an earlier run named ``run``."""
    monkeypatch.chdir(tmp_path)
    start()
    (tmp_path / "runs/run/kept").touch()
    return tmp_path / "runs/run"


def start(*overrides: str, variables: dict[str, str] | None = None) -> tuple[RunConfig, list[str]]:
    """Open the folder of a run as a command does; return its configuration and what it says of
    earlier runs.
    """
    identity = LaunchIdentity.detect(variables or {}, launcher="")
    options = LaunchOptions(
        fork_server=multiprocessing.get_context("forkserver"), started=0.0, identity=identity
    )
    request = Request(overrides=["name=run", "launch.nproc=1", *overrides])
    [run] = runs.load_runs(request, ClusterEnvironment(), options)
    said: list[str] = []
    by = identity.name
    with open_run_dir(run.config, announce=said.append, launched_by=by) as opened:
        return opened, [line for line in said if "earlier run" in line]


def test_overwritten_run_is_kept_under_name_with_number(folder: Path) -> None:
    opened, said = start(OVERWRITE)
    assert said == [f"run: starting over; the earlier run was moved to {folder}.1"]
    assert Path(f"{folder}.1/kept").exists()
    assert not (folder / "kept").exists()
    start(OVERWRITE)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run", "run.1", "run.2"]
    assert Path(f"{folder}.1/kept").exists()
    assert (opened.checkpoint.resume, opened.checkpoint.overwrite) == ("auto", False)


def test_overwrite_without_earlier_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert start(OVERWRITE)[1] == []
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_requeued_job_does_not_move_its_run_aside_again(folder: Path) -> None:
    start(OVERWRITE, variables=JOB)
    start(OVERWRITE, variables={**JOB, "SLURM_RESTART_COUNT": "1"})
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run", "run.1"]
    start(OVERWRITE, variables={"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "1"})
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run", "run.1", "run.2"]


def test_run_that_trains_is_not_moved_aside(folder: Path) -> None:
    with folder_lock(folder / "logs"), pytest.raises(ConfigError, match="another process is train"):
        start(OVERWRITE)
    assert (folder / "kept").exists()


@pytest.mark.parametrize(
    "override", ["checkpoint.resume=runs/run", "model.weights=runs/run/checkpoints/step_2"]
)
def test_reading_from_overwritten_run_is_refused(override: str, folder: Path) -> None:
    message = f"{override}: is in the run that checkpoint.overwrite=true moves aside"
    with pytest.raises(ConfigError, match=message):
        start(OVERWRITE, override)
    assert (folder / "kept").exists()


@pytest.mark.parametrize(
    ("overrides", "words", "resuming"),
    [
        ([OVERWRITE], ["again.yaml"], ["again.yaml", "name=run", OFF]),
        ([OVERWRITE], ["name=run", OVERWRITE, "seed=1"], ["seed=1", "name=run", OFF]),
        ([], ["seed=1"], ["seed=1", "name=run"]),
    ],
)
def test_command_that_resumes_a_run_does_not_overwrite_it(
    overrides: list[str], words: list[str], resuming: list[str]
) -> None:
    composed = compose(overrides)
    config = with_values(load(["name=run"]), {"run_dir": "runs/run"})
    command = resuming_command(config, ["axonlaunch", *words], composed=composed, name=None)
    assert command == " ".join(["axonlaunch", *resuming])


def test_overwrite_trains_a_finished_run_again(served: Command) -> None:
    overrides = ["name=run", "strategy=single", "train.steps=2", "checkpoint.every=1"]
    served.train(*overrides, "seed=1")
    first = served.losses("run")
    said = served.train(*overrides, OVERWRITE, "model.hidden_size=16").stdout
    assert "starting over; the earlier run was moved to" in " ".join(said.split())
    assert len(served.losses("run")) == 2
    assert served.losses("run.1") == first
    assert (served.folder / "runs/run.1/checkpoints/step_2").is_dir()
