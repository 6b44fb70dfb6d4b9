"""A run that torchrun or SLURM restarts stays the same run, however its command resumes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from support.command import Command

from axonlaunch.config import ConfigError, RunConfig, load
from axonlaunch.launch import runs
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.environment.environment_variables import LaunchIdentity
from axonlaunch.launch.environment.launcher_process import LauncherProcess
from axonlaunch.launch.external import entry, rank
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.request import Request
from axonlaunch.launch.run_folder.names import with_run_dir
from axonlaunch.launch.run_folder.open_folder import open_run_dir
from axonlaunch.launch.run_folder.restarts import resumes_if_restarted
from axonlaunch.system.storage.run_files import append_event

NEVER = "checkpoint.resume=never"
OWN = "checkpoint.resume=runs/run/checkpoints/step_2"
OTHER = "checkpoint.resume=runs/other"
JOB = {"SLURM_JOB_ID": "41"}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (OWN, OTHER):
        Path(folder.partition("=")[2]).mkdir(parents=True)


def start(variables: dict[str, str], *overrides: str, until: str = "started") -> RunConfig:
    """Start a run as a command does, until it has been launched or its ranks have started."""
    identity = LaunchIdentity.detect(variables, launcher="")
    context = multiprocessing.get_context("forkserver")
    options = LaunchOptions(fork_server=context, started=0.0, identity=identity)
    request = Request(overrides=["name=run", "launch.nproc=1", *overrides])
    [run] = runs.load_runs(request, ClusterEnvironment(), options)
    by = identity.name
    with open_run_dir(run.config, announce=lambda line: None, launched_by=by) as opened:
        if until == "started":
            append_event(Path(opened.run_dir), "started", {})
        return opened


@pytest.mark.parametrize("begun", [NEVER, OWN])
def test_requeued_job_resumes_from_its_checkpoints(begun: str) -> None:
    assert start(JOB, begun).checkpoint.resume == begun.partition("=")[2]
    for count in ("1", "2"):
        again = start({**JOB, "SLURM_RESTART_COUNT": count}, begun, until="launched")
        assert again.checkpoint.resume == "auto"


def test_requeued_job_repeats_requested_resume() -> None:
    start(JOB, OWN, until="launched")
    again = start({**JOB, "SLURM_RESTART_COUNT": "1"}, OWN)
    assert again.checkpoint.resume == OWN.partition("=")[2]


def test_requeued_job_without_save_starts_from_same_checkpoint() -> None:
    start(JOB, OTHER)
    again = start({**JOB, "SLURM_RESTART_COUNT": "1"}, OTHER)
    assert again.checkpoint.resume == "runs/other"


@pytest.mark.parametrize(
    "variables",
    [{}, JOB, {**JOB, "SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "1"}],
    ids=["by hand", "the same job, not restarted", "another job"],
)
def test_resume_never_refuses_folder_of_other_launch(variables: dict[str, str]) -> None:
    start(JOB, NEVER)
    with pytest.raises(ConfigError) as raised:
        start(variables, NEVER)
    [issue] = raised.value.problems
    assert "already contains a run; choose another name" in str(issue)


def test_requeued_job_refuses_folder_used_since() -> None:
    start(JOB, NEVER)
    start({}, "checkpoint.resume=auto")
    with pytest.raises(ConfigError):
        start({**JOB, "SLURM_RESTART_COUNT": "1"}, NEVER)


def test_torchrun_attempts_share_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    identities = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        identities.append(LauncherProcess("torchrun").identity)
    first, second = identities
    assert first.name == second.name
    assert first.name.startswith(f"torchrun {os.getppid()} of ")
    assert (first.is_restart, second.is_restart) == (False, True)


@pytest.mark.parametrize(
    ("variables", "is_the_same"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1", **JOB}, False),  # a job may have several runs
    ],
)
def test_torchrun_restart_finds_unnamed_run(variables: dict[str, str], is_the_same: bool) -> None:
    request = ["launch.nproc=1"]
    for by in ("torchrun 1", "torchrun 2"):
        with open_run_dir(load(request), announce=lambda line: None, launched_by=by):
            pass
    identity = LaunchIdentity.detect(variables, launcher="torchrun 1")
    config = resumes_if_restarted(load(request), identity)
    assert (config.run_dir != "auto") == is_the_same
    if is_the_same:
        assert with_run_dir(config).name == "gpt-single"


def test_torchrun_restart_resumes_from_run_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "main", lambda environment, resolve, **_: (0, resolve(environment)))
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    environment = ClusterEnvironment.detect({**world, **address})
    request = Request(overrides=["name=own", "train.steps=1", NEVER])
    Path("runs/own").mkdir()
    resumes = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        launcher = LauncherProcess("torchrun")
        _, resolved = entry.be_rank(
            request, environment, launcher, server=pytest.fail, started=0.0, as_json=False
        )
        config: RunConfig = resolved[1]  # type: ignore[index]
        resumes.append(config.checkpoint.resume)
        append_event(Path("runs/own"), "launched", {"by": launcher.identity.name})
        Path("runs/own/config.yaml").write_text("name: own\n")
    assert resumes == ["never", "auto"]


def test_torchrun_refuses_a_moved_run_as_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "main", lambda environment, resolve, **_: (0, resolve(environment)))
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    moved = Path("moved")
    moved.mkdir()
    append_event(moved, "started", {})
    (moved / "config.yaml").write_text("name: own\nrun_dir: /nowhere/own\n")
    with pytest.raises(ConfigError, match=r"moved/config\.yaml was moved or copied"):
        entry.be_rank(
            Request(overrides=["moved/config.yaml"]),
            ClusterEnvironment.detect({**world, **address}),
            LauncherProcess("torchrun"),
            server=pytest.fail,
            started=0.0,
            as_json=False,
        )


def test_requeued_job_command_resumes_from_its_save(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["name=own", "strategy=single", "checkpoint.every=1", NEVER]
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    served.train(*command, "train.steps=1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "resumed from runs/own/checkpoints/step_1" in served.train(*command).stdout
