"""The final state of a SLURM job is the state that SLURM reports, otherwise unknown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError
from axonlaunch.launch.external import followed_job
from axonlaunch.launch.external.slurm import launcher as slurm_launcher, slurm_job
from axonlaunch.launch.external.submitted_jobs import find_job

FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
UNREACHABLE = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


def says(state: str, code: str = "0:0") -> str:
    return f"echo 'JobId=7 JobName=job JobState={state} Reason=None ExitCode={code}'"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the only one on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(followed_job, "_POLL_S", 0.0)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def submitted(programs: Path, **scripts: str) -> tuple[int, str, list[str]]:
    """Submit a job with scripts for programs; return status, state and printed lines."""
    for name, script in {"sbatch": "echo 7", **scripts}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    config = configuration.load(["launch=slurm", "launch.nproc=1", "name=job"])
    lines: list[str] = []
    status, content = slurm_launcher.submit(config, announce=lines.append)
    return status, content["state"], lines[1:]


@pytest.mark.parametrize(
    "state",
    [
        *("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "REVOKED", "TIMEOUT"),
    ],
)
def test_incomplete_job_counts_as_failed(state: str, programs: Path) -> None:
    ended = submitted(programs, scontrol=says(state))
    assert ended == (1, state, [f"job 7: {state.lower()}"])


@pytest.mark.parametrize(
    ("code", "status", "note"),
    [
        ("1:0", 1, "failed"),
        ("2:0", 2, "failed (configuration error)"),
        (
            "75:0",
            75,
            "failed (a node was lost, or it could not start); resume it with axonlaunch resume job",
        ),
        ("130:0", 130, "is stopped; resume it with axonlaunch resume job"),
        ("2:9", 1, "failed"),
    ],
)
def test_failed_job_has_the_exit_status_of_the_run(
    code: str, status: int, note: str, programs: Path
) -> None:
    ended = submitted(programs, scontrol=says("FAILED", code))
    assert ended == (status, "FAILED", [f"job 7: {note}"])


@pytest.mark.parametrize("state", ["PENDING", "CONFIGURING"])
def test_job_stopped_before_its_start_is_cancelled_and_ends_the_command_as_stopped(
    state: str, programs: Path
) -> None:
    submitted(programs, scontrol=says("COMPLETED"), scancel="echo $@ >> scancelled")
    job = slurm_job.SlurmJob.of_folder(Path("runs/job"))
    assert job is not None
    (programs / "scontrol").write_text(f"#!/bin/sh\n{says('CANCELLED', '0:0')}\n")
    assert job.state().status == 1  # by scancel
    (programs / "scontrol").write_text(f"#!/bin/sh\n{says(state)}\n")
    assert job.stop() == "job 7 is cancelled before its start; resume it with axonlaunch resume job"
    (programs / "scontrol").write_text(f"#!/bin/sh\n{says('CANCELLED', '0:0')}\n")
    note = "job 7: is stopped; resume it with axonlaunch resume job"
    assert job.state() == followed_job.JobState("CANCELLED", note, 130)
    assert Path("scancelled").read_text() == "7\n"
    Path("runs/job/job.number").write_text("8\n")  # a later job
    later = slurm_job.SlurmJob.of_folder(Path("runs/job"))
    assert later is not None
    assert later.state().status == 1


def test_log_of_a_job_is_read_by_whole_characters(tmp_path: Path) -> None:
    job = slurm_job.SlurmJob(tmp_path, "7")
    line = "übung\n".encode()
    job.log.write_bytes(line[:1])
    assert job.read_log() == ""
    job.log.write_bytes(line)
    assert job.read_log() == "übung\n"
    job.log.write_bytes(line + b"\xff\n")  # no UTF-8
    assert job.read_log() == "\N{REPLACEMENT CHARACTER}\n"


def test_job_that_slurm_refuses_to_stop_does_not_count_as_stopped(programs: Path) -> None:
    refuses = "echo 'scancel: error: Kill job error: Access denied' >&2; exit 1"
    submitted(programs, scontrol=says("COMPLETED"), scancel=refuses)
    (programs / "scontrol").write_text(f"#!/bin/sh\n{says('PENDING')}\n")
    job = slurm_job.SlurmJob.of_folder(Path("runs/job"))
    assert job is not None
    with pytest.raises(ConfigError, match="Access denied"):
        job.stop()
    (programs / "scontrol").write_text(f"#!/bin/sh\n{says('CANCELLED', '0:0')}\n")
    assert job.state().status == 1


def test_two_commands_submit_no_two_jobs_of_a_run(programs: Path) -> None:
    submitted(programs, scontrol=says("COMPLETED"))
    job = slurm_job.SlurmJob.of_folder(Path("runs/job"))
    assert job is not None
    # The second command begins while the first waits for sbatch.
    with slurm_job.only_submission(Path("runs/job")):
        with pytest.raises(ConfigError, match="another command is submitting this run"):
            job.resume()
        with pytest.raises(ConfigError, match="another command is submitting this run"):
            submitted(programs)
    job.resume()
    submitted(programs, scontrol=says("COMPLETED"))


@pytest.mark.parametrize("has_run", [False, True])
def test_failed_submission_leaves_only_the_run_that_was_there(
    has_run: bool, programs: Path
) -> None:
    """A new folder would take the name, and one with a configuration would refuse the job."""
    frozen = Path("runs/job/config.yaml")
    if has_run:
        frozen.parent.mkdir(parents=True)
        frozen.write_text("of the last launch")
    with pytest.raises(ConfigError, match="sbatch failed: no such partition"):
        submitted(programs, sbatch="echo 'sbatch: error: no such partition' >&2; exit 1")
    assert Path("runs/job").exists() == has_run
    submitted(programs, scontrol=says("COMPLETED"))
    with pytest.raises(ConfigError, match="job 7 of this folder is running"):
        submitted(programs, scontrol=says("RUNNING"))
    assert frozen.exists() == has_run
    assert not has_run or frozen.read_text() == "of the last launch"


def test_a_job_that_completed_succeeded(programs: Path) -> None:
    ended = submitted(programs, scontrol=says("COMPLETED"))
    assert ended == (0, "COMPLETED", ["job 7: completed"])


def test_a_job_that_completed_with_an_exit_code_failed(programs: Path) -> None:
    ended = submitted(programs, scontrol=says("COMPLETED", code="3:0"))
    assert ended == (1, "COMPLETED", ["job 7: completed with exit code 3:0"])


@pytest.mark.parametrize(
    ("written", "status", "state"),
    [("COMPLETED|0:0", 0, "COMPLETED"), ("CANCELLED by 1000|0:15", 1, "CANCELLED")],
)
def test_forgotten_job_state_comes_from_accounting(
    written: str, status: int, state: str, programs: Path
) -> None:
    ended = submitted(programs, scontrol=FORGOTTEN, sacct=f"echo '{written}'")
    assert ended[:2] == (status, state)


@pytest.mark.parametrize(
    ("accounting", "reason"),
    [
        ({}, "there is no sacct here"),
        ({"sacct": NO_ACCOUNTING}, "sacct: Slurm accounting storage is disabled"),
        ({"sacct": "true"}, "sacct does not know it"),
        ({"sacct": "echo 'RUNNING|0:0'"}, "sacct reports RUNNING"),
    ],
)
def test_job_with_unknown_end_is_reported_as_no_success(
    accounting: dict[str, str], reason: str, programs: Path
) -> None:
    status, state, lines = submitted(programs, scontrol=FORGOTTEN, **accounting)
    log = Path("runs/job/slurm-7.out").absolute()
    assert (status, state) == (1, "UNKNOWN")
    assert lines == [
        f"job 7 has ended with an unknown state: the controller does not know the job any more, "
        f"and {reason}; see {log}"
    ]


def test_job_is_followed_while_controller_is_unreachable(programs: Path) -> None:
    once = programs / "once"
    answers = f"if [ ! -e {once} ]; then : > {once}; {UNREACHABLE}; fi; {says('COMPLETED')}"
    status, _, lines = submitted(programs, scontrol=answers)
    assert status == 0
    assert lines == [
        "job 7: SLURM can't be queried (scontrol: slurm_load_jobs error: Unable to contact slurm "
        "controller); still following its log",
        "job 7: completed",
    ]


def test_hanging_slurm_programs_time_out(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "_ANSWER_S", 0.05)
    lasting = f"exec {os.defpath.split(':')[-1]}/sleep 60"
    once = programs / "once"
    answers = f"if [ ! -e {once} ]; then : > {once}; {lasting}; fi; {says('COMPLETED')}"
    _, _, lines = submitted(programs, scontrol=answers)
    assert lines[0].startswith("job 7: SLURM can't be queried (scontrol does not answer); ")


def test_run_without_a_job_is_an_error_that_names_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/demo/logs").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"the log of rank N is runs/demo/logs/rank_N\.log"):
        find_job("demo", None)
