"""Refuses the configuration of a run whose folder was moved or copied."""

from __future__ import annotations

from pathlib import Path

from axonlaunch.config import CONFIG, Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.values.url import shortened
from axonlaunch.system.storage.run_files import EVENTS


def refuse_moved_run(composed: Composed, config: RunConfig) -> None:
    """Refuse a run folder's ``config.yaml`` that names another folder.

    The run would start from step 0 in a folder where it no longer is, or continue the original of a
    copy.

    Args:
        composed: Composed files and overrides.
        config: The configuration that they describe.

    Raises:
        ConfigError: The folder of the file has a run, and ``run_dir`` in the file is another one.
    """
    file = Path(composed.primary)
    here, named = file.parent, config.run_dir
    if "run_dir" in composed.overridden or file.name != CONFIG or not (here / EVENTS).is_file():
        return
    if Path(named).resolve() == here.resolve():
        return
    message = (
        f"{shortened(str(file))} was moved or copied from there; to continue the run where the "
        f"file is, write run_dir={shortened(str(here))}, else run_dir={named}"
    )
    raise ConfigError([ConfigIssue("run_dir", message, named)])
