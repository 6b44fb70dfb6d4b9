"""A run as a SLURM job: its script, its submission, its log.

The job starts one process on each node, which takes everything else from SLURM's variables. SLURM
does the rest: it queues, signals, kills and queues again; the run resumes in the same folder.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.errors import gathering
from axonlaunch.launch import run_dir
from axonlaunch.launch.launcher import LaunchOptions, check_anywhere
from axonlaunch.launch.multinode import token
from axonlaunch.system.files import replace_text

SCRIPT = "job.sbatch"
JOB = "job.yaml"
TOKEN = "token"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
_POLL_S = 1.0


def render(config: RunConfig, *, python: str = sys.executable) -> str:
    """Write the batch script of a run whose ``name``, ``run_dir`` and ranks are resolved.

    Near its time limit the job is signalled, saves a checkpoint and is queued again; a job that is
    pre-empted gets SIGTERM from SLURM itself, and is queued again by it.
    """
    launch, folder = config.launch, config.run_dir
    options = [
        f"--job-name={Path(config.name).name}",
        f"--nodes={launch.nnodes}",
        "--ntasks-per-node=1",
        f"--output={folder}/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",
    ]
    if launch.device == "cuda" or (launch.device == "auto" and launch.backend != "gloo"):
        devices = 1 if launch.backend == "gloo" else launch.nproc  # gloo's ranks share it
        options.append(f"--gpus-per-node={devices}")
    cpus = launch.slurm.cpus_per_task
    options.append("--exclusive" if cpus is None else f"--cpus-per-task={cpus}")
    if launch.slurm.partition:
        options.append(f"--partition={launch.slurm.partition}")
    if launch.slurm.account:
        options.append(f"--account={launch.slurm.account}")
    if launch.slurm.time:
        options.append(f"--time={launch.slurm.time}")
    command = [
        *(python, "-P", "-m", "axonlaunch", "train", "--config-dir", folder),
        *("--config-name", Path(JOB).stem, "launch.name=auto"),
    ]
    # sbatch divides such a line at blanks, and takes quotes as a shell does.
    options = [*map(shlex.quote, options), *launch.slurm.extra_args]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        f"cd {shlex.quote(str(Path.cwd()))}",
        *launch.slurm.prologue,
        "# Shortly before the time limit: checkpoint and requeue.",
        "again=",
        "trap 'again=yes; scancel --signal=TERM \"$SLURM_JOB_ID\"' USR1",
        *([] if cpus is None else ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]),
        f"srun --kill-on-bad-exit=1 --cpu-bind=none {shlex.join(command)} &",
        "while true; do",
        "    wait $!",
        "    status=$?",
        "    kill -0 $! 2>/dev/null || break",
        "done",
        'if [ -n "$again" ] && [ $status -ne 0 ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $status",
    ]
    return "\n".join(lines) + "\n"


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Check a run by what holds on every node that has its devices.

    Raises:
        ConfigError: It can't be run there or submitted here, or a job has to know more of it.
    """
    issues = _job_issues(config)
    if not issues:
        with gathering(issues):
            config = check_anywhere(config, options)
    if not options.render:
        if shutil.which("sbatch") is None:
            message = "there is no sbatch here; submit from a node of the cluster"
            issues.append(ConfigIssue("launch.name", message, "slurm"))
        with gathering(issues):
            run_dir.check_run_dir(config)
    if issues:
        raise ConfigError(issues)
    return config


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any] | None]:
    """Submit a run and follow it to its end, or print its script.

    Args:
        config: As ``check`` returned it.
        options: Of the command.

    Returns:
        The exit status and the job's number, folder and last state; None of a script.

    Raises:
        ConfigError: ``sbatch`` refuses.
    """
    if options.render:
        print(render(run_dir.with_run_dir(config)), end="")
        return 0, None
    output = sys.stderr if options.as_json else sys.stdout
    return submit(config, announce=lambda text: print(text, file=output))


def submit(config: RunConfig, *, announce: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Submit a run, and follow its log until it ends.

    Ctrl-C ends the following, not the job.

    Args:
        config: Checked, its ranks resolved.
        announce: Takes lines for the user.

    Returns:
        The exit status, and the job's number, folder and last state.

    Raises:
        ConfigError: ``sbatch`` refuses.
    """
    with run_dir.open_run_dir(config, announce=announce, is_submitted=True) as config:
        folder = Path(config.run_dir)
        script = _write(config, folder)
    command = ["sbatch", "--parsable", str(script)]
    submitted = subprocess.run(command, capture_output=True, text=True, check=False)
    if submitted.returncode:
        reason = " ".join(submitted.stderr.replace("sbatch: error:", "").split())
        raise ConfigError([ConfigIssue("launch", f"sbatch failed: {reason}")])
    job = submitted.stdout.strip().partition(";")[0]
    announce(f"job {job} submitted; scancel {job} ends it, Ctrl-C here only stops following it")
    content: dict[str, Any] = {"job_id": int(job), "run_dir": config.run_dir}
    try:
        content["state"] = _follow(job, folder / f"slurm-{job}.out", announce)
    except KeyboardInterrupt:
        announce(f"job {job} is still running; log: {folder / f'slurm-{job}.out'}")
        return 130, {**content, "state": _state(job)}
    announce(f"job {job}: {content['state'].lower()}")
    return (0 if content["state"] == "COMPLETED" else 1), content


def _write(config: RunConfig, folder: Path) -> Path:
    if config.launch.token_file is None:
        # The folder is on a file system that the job's nodes share.
        token.create_token(folder / TOKEN)
        config = configuration.with_values(
            config, {"launch.token_file": str((folder / TOKEN).absolute())}
        )
    replace_text(folder / JOB, configuration.to_yaml(config))
    (folder / CONFIG).unlink()  # the run is yet to begin
    replace_text(folder / SCRIPT, render(config))
    return folder / SCRIPT


def _job_issues(config: RunConfig) -> list[ConfigIssue]:
    """Report settings that a job needs in writing, for this node can't resolve them."""
    issues: list[ConfigIssue] = []
    if config.launch.nproc == "auto":
        message = "is required for a job; write the number of devices per node"
        issues.append(ConfigIssue("launch.nproc", message, "auto"))
    if config.launch.backend == "mock":
        message = "its ranks are threads of one process; use auto, gloo or nccl"
        issues.append(ConfigIssue("launch.backend", message, "mock"))
    return issues


def _follow(job: str, log: Path, announce: Callable[[str], None]) -> str:
    """Print a job's log until it has ended; return its last state."""
    read, state = 0, ""
    while True:
        now = _state(job)
        if now != state and now == "PENDING":
            announce(f"job {job} is pending")
        state = now
        if log.exists():
            with log.open("rb") as stream:
                stream.seek(read)
                content = stream.read()
            read += len(content)
            sys.stderr.write(content.decode(errors="replace"))
            sys.stderr.flush()
        if state.startswith(_ENDED):
            return state
        time.sleep(_POLL_S)


def _state(job: str) -> str:
    """Return a job's state; one that the controller has forgotten ended as its accounting says."""
    command = ["scontrol", "show", "job", job, "--oneliner"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bJobState=(\w+)", answer)
    if match:
        return match[1]
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "-j", job]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return (answer.split() or ["COMPLETED"])[0]
