"""Generated scripts of SLURM jobs, compared with expected files in this folder.

If a change is intended, the test prints the script: write it to the file, and read the difference.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.launch.external import save_time
from axonlaunch.launch.external.slurm import batch_script, launcher as slurm_launcher, slurm_job
from axonlaunch.launch.launcher import LaunchOptions

SCRIPTS = Path(__file__).with_name("job_scripts")
JOBS = {
    "one_node": ["launch.nproc=8", "strategy=fsdp"],
    "several_nodes": [
        *("launch.nproc=8", "launch.nnodes=4", "strategy=hsdp", "launch.slurm.partition=gpu"),
        *("launch.slurm.account=lab", "launch.slurm.time=8:00:00", "launch.slurm.cpus_per_task=96"),
        "train.global_batch_size=32",
        "launch.slurm.extra_args=['--qos=high','--constraint=h100']",
        "launch.slurm.prologue=['module load cuda','export NCCL_SOCKET_IFNAME=ib0']",
    ],
    "on_the_cpu": ["launch.nproc=2", "launch.device=cpu", "launch.slurm.cpus_per_task=4"],
    "checkpoints_in_a_bucket": ["launch.nproc=8", "checkpoint.path=s3://bucket/big"],
}


@pytest.mark.parametrize("job", JOBS)
def test_job_script_equals_stored_file(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    named = ["launch=slurm", "name=big", "run_dir=/shared/my runs/big"]
    script = batch_script.render(
        configuration.load([*named, *JOBS[job]]), python="/shared/venv/bin/python"
    )
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    path = SCRIPTS / f"{job}.sbatch"
    assert script == path.read_text(), f"the script of this job is no longer {path}:\n\n{script}"


def test_settings_that_slurm_resolves_are_refused_before_the_job_waits() -> None:
    words = ["launch=slurm", "launch.nnodes=2:4", "launch.nproc=8", "launch.master_port=29500"]
    config = configuration.load(
        [*words, "launch.master_addr=10.0.0.1", "train.global_batch_size=96"]
    )
    options = LaunchOptions(fork_server=None, started=0.0, render=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        slurm_launcher.check(config, options)
    assert [str(problem) for problem in caught.value.problems] == [
        "launch.nnodes=2:4: a job has a fixed number of nodes; write one number",
        "launch.master_addr=10.0.0.1: SLURM sets it on each node; remove this setting",
        "launch.master_port=29500: SLURM sets it on each node; remove this setting",
    ]


@pytest.mark.parametrize(
    ("saved_gb", "written", "time", "seconds"),
    [
        (0.5, "auto", "null", 120),
        (160, "auto", "null", 12860),
        (160, "600", "null", 600),
        (160, "auto", "2-0", 12860),
        (160, "auto", "30", 900),
        (0.5, "auto", "1:30", 45),
        (1600, "auto", "null", 65535),
    ],
)
def test_signal_before_the_time_limit_leaves_time_for_a_checkpoint(
    saved_gb: float,
    written: str,
    time: str,
    seconds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The 8 ranks of a node write at 100 MB/s together."""
    rank = SimpleNamespace(saved_bytes=saved_gb * 1e9, host_bytes=0)
    monkeypatch.setattr(save_time, "resolve_for_node", lambda context, config: config)
    monkeypatch.setattr(save_time, "forecast", lambda *arguments: SimpleNamespace(estimate=rank))
    words = ["launch=slurm", "launch.nproc=8", "name=big", f"launch.slurm.grace_s={written}"]
    words.append(f"launch.slurm.time='{time}'" if time != "null" else "launch.slurm.time=null")
    options = LaunchOptions(fork_server=None, started=0.0, render=True)  # type: ignore[arg-type]
    slurm_launcher.launch(configuration.load(words), options)
    printed = capsys.readouterr()
    assert f"#SBATCH --signal=B:USR1@{seconds}\n" in printed.out
    is_less = seconds in (900, 45, 65535)
    assert printed.err.startswith(f"note: launch.slurm.grace_s={seconds}, the most ") == is_less


def test_run_that_cannot_be_estimated_is_submitted_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any) -> None:
        raise ConfigError([ConfigIssue("model", "can't be traced")])

    monkeypatch.setattr(save_time, "resolve_for_node", refuse)
    options = LaunchOptions(fork_server=None, started=0.0, render=True)  # type: ignore[arg-type]
    slurm_launcher.launch(
        configuration.load(["launch=slurm", "launch.nproc=8", "name=big"]), options
    )
    printed = capsys.readouterr()
    assert "USR1@120" in printed.out
    assert printed.err == (
        "note: launch.slurm.grace_s=120, because the run can't be estimated: model: can't be "
        "traced\n"
    )


def test_run_folder_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError) as refused, slurm_job.only_submission(missing):
        pytest.fail("it is submitted")
    reason = f"can't be submitted from here: No such file or directory: {missing}/job.lock"
    assert str(refused.value) == f"run_dir={missing}: {reason}"
