"""Runs that their launcher or scheduler starts again."""

from __future__ import annotations

from pathlib import Path

from axonlaunch.checkpoint.loading.resume_source import is_launched_by, resume_of_restart
from axonlaunch.config import RunConfig, with_values
from axonlaunch.diagnostics.report.record.run_record import NotARunError, find_launched, read_run
from axonlaunch.launch.environment.environment_variables import LaunchIdentity
from axonlaunch.launch.run_folder.names import with_run_dir


def resumes_if_restarted(config: RunConfig, identity: LaunchIdentity) -> RunConfig:
    """Make a run resume from its latest checkpoint if its launcher or scheduler restarts it."""
    if not (identity.name and identity.is_restart):
        return config
    if config.name == config.run_dir == "auto":
        folder = find_launched(Path("runs"), by=identity.name) if identity.has_one_run else None
        if folder is None:
            return config
        config = with_values(config, {"run_dir": str(folder)})
    resolved = with_run_dir(config)
    try:
        events = read_run(Path(resolved.run_dir)).events
    except NotARunError:
        return config
    resume = resume_of_restart(resolved, events, launched_by=identity.name)
    overwrites = config.checkpoint.overwrite and not is_launched_by(events, identity.name)
    return with_values(config, {"checkpoint.resume": resume, "checkpoint.overwrite": overwrites})
