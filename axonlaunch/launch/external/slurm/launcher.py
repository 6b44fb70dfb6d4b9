"""Checks a run that is to be a SLURM job, submits it and follows its log to its end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.launch import MOST_GRACE_S
from axonlaunch.config.problems.errors import gathering
from axonlaunch.launch.external.followed_job import follow_job
from axonlaunch.launch.external.save_time import estimate_submitted, seconds_to_save
from axonlaunch.launch.external.slurm.batch_script import JOB, LEAST_GRACE_S, TOKEN, render
from axonlaunch.launch.external.slurm.slurm_job import (
    LOCK,
    SCRIPT,
    SlurmJob,
    only_submission,
    refuse_second_job,
    submit_script,
)
from axonlaunch.launch.launcher import (
    RESOLVED_SETTINGS,
    LaunchOptions,
    check_anywhere,
    submission_issues,
)
from axonlaunch.launch.multinode import token
from axonlaunch.launch.run_folder.names import with_run_dir
from axonlaunch.launch.run_folder.open_folder import check_run_dir, open_run_dir
from axonlaunch.system.storage.files import replace_text


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Run the checks that apply to every node with the run's devices, and check the submission.

    Raises:
        ConfigError: No such node can run the configuration, it can't be submitted here, or a
            setting that a job needs is missing.
    """
    issues = list(
        submission_issues(
            config.launch,
            target="job",
            run="a job",
            node="node",
            origin="SLURM sets it on each node",
            resolved=[key for key in RESOLVED_SETTINGS if key != "token_file"],
        )
    )
    if not issues:
        with gathering(issues):
            config = check_anywhere(config, options)
    if not options.render:
        if shutil.which("sbatch") is None:
            message = "there is no sbatch here; submit from a node of the cluster"
            issues.append(ConfigIssue("launch.name", message, "slurm"))
        with gathering(issues):
            # A running job locks its folder: say that first. A waiting job does not, and
            # checkpoint.overwrite would move its folder aside.
            if not issues:
                refuse_second_job(Path(with_run_dir(config).run_dir))
            check_run_dir(config)
    if issues:
        raise ConfigError(issues)
    return config


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any] | None]:
    """Submit a run and follow it to its end, or print its script.

    Args:
        config: Configuration returned by ``check``.
        options: Options of the launch.

    Returns:
        The exit status and the job's number, folder and last state; None instead of the latter if
        the script was printed.

    Raises:
        ConfigError: ``sbatch`` failed.
    """
    if config.launch.slurm.grace_s == "auto":
        grace = _estimated_grace_s(config, options.fork_server)
        config = configuration.with_values(config, {"launch.slurm.grace_s": grace})
    if options.render:
        print(render(with_run_dir(config), makes_folder=True), end="")
        return 0, None
    output = sys.stderr if options.as_json else sys.stdout
    return submit(config, announce=lambda text: print(text, file=output))


def _estimated_grace_s(config: RunConfig, context: ForkServerContext) -> int:
    """Return the seconds that a node needs to finish a step and save; note if they are unknown."""
    try:
        estimate = estimate_submitted(config, context)
    except ConfigError as error:
        needed = LEAST_GRACE_S
        sys.stderr.write(
            f"note: launch.slurm.grace_s={needed}, because the run can't be estimated: "
            f"{error.problems[0]}\n"
        )
    else:
        needed = max(LEAST_GRACE_S, seconds_to_save(config, estimate))
    return min(needed, _most_grace_s(config, needed))


def _most_grace_s(config: RunConfig, needed: int) -> int:
    """Return the longest grace period with time for steps before it; note if more is needed."""
    limit = config.launch.slurm.limit_s
    most = MOST_GRACE_S if limit is None else min(MOST_GRACE_S, max(1, limit // 2))
    if most < needed:
        bound = f"of launch.slurm.time={config.launch.slurm.time}" if limit else "SLURM allows"
        sys.stderr.write(
            f"note: launch.slurm.grace_s={most}, the most {bound}; a checkpoint may need "
            f"{needed} s\n"
        )
    return most


def submit(config: RunConfig, *, announce: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Submit a run and follow its log until the job ends.

    Ctrl-C stops following the log, but does not end the job.

    Args:
        config: Checked configuration with resolved ``launch.nproc``.
        announce: Receives lines for the user.

    Returns:
        The exit status, and the job's number, folder and last state.

    Raises:
        ConfigError: ``sbatch`` failed. A run folder that was made for the job is removed.
    """
    # Again, because earlier runs of a sweep may have taken hours: before checkpoint.overwrite moves
    # the folder of a job that another command has submitted meanwhile.
    planned = Path(with_run_dir(config).run_dir)
    refuse_second_job(planned)
    is_new = not planned.exists()
    with ExitStack() as submission:
        with open_run_dir(config, announce=announce, is_submitted=True) as config:
            folder = Path(config.run_dir)
            submission.enter_context(only_submission(folder))
            _write(config, folder)
        # The job, which may begin at once, locks the folder itself.
        try:
            job = submit_script(folder)
        except ConfigError:
            if is_new:
                _remove_submission(folder)
            raise
    announce(f"job {job} submitted; scancel {job} ends it, Ctrl-C here only stops following it")
    status, state = follow_job(SlurmJob(folder, job), announce)
    return status, {"job_id": int(job), "run_dir": config.run_dir, "state": state}


def _write(config: RunConfig, folder: Path) -> None:
    if config.launch.token_file is None:
        # The run folder is on a file system shared by the nodes of the job.
        token.create_token(folder / TOKEN)
        config = configuration.with_values(
            config, {"launch.token_file": str((folder / TOKEN).absolute())}
        )
    replace_text(folder / JOB, configuration.to_yaml(config))
    replace_text(folder / SCRIPT, render(config))


def _remove_submission(folder: Path) -> None:
    """Remove a run folder that has only the files of a submission."""
    for name in (SCRIPT, JOB, TOKEN, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it
        (folder / "logs").rmdir()
        folder.rmdir()
