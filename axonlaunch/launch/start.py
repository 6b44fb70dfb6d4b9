"""From a command's overrides to runs: one, or a sweep's, in turn.

It chooses the launcher; the launcher does the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import Composer, ConfigError, Problem, RunConfig
from axonlaunch.launch import forkserver, local
from axonlaunch.launch.run_folder import default_name


def start(
    overrides: Sequence[str],
    *,
    config_name: str,
    config_dirs: Sequence[Path],
    multirun: bool,
    started: float,
    as_json: bool,
) -> tuple[int, list[dict[str, Any]]]:
    """Run what a command line asks for.

    Every configuration of a sweep is checked before the first run starts.

    Returns:
        The first exit status that is not 0, and the summary of each run.

    Raises:
        ConfigError: A configuration can't be run.
    """
    # The server imports torch in the background while Hydra composes.
    with forkserver.warm() as context:
        composer = Composer(config_dirs=config_dirs)
        batches = composer.sweep(overrides) if multirun else [list(overrides)]
        configs = [_load(composer, batch, config_name, multirun) for batch in batches]
        if multirun:
            configs = [_numbered(config, index) for index, config in enumerate(configs)]
        summaries = []
        for config in configs:
            status, summary = local.train(config, context, started=started, as_json=as_json)
            summaries.append(summary)
            if status:
                break
        return status, summaries


def _load(composer: Composer, overrides: list[str], config_name: str, multirun: bool) -> RunConfig:
    try:
        return configuration.typed(composer.compose(overrides, config_name=config_name))
    except ConfigError as error:
        if not multirun:
            raise
        where = " ".join(overrides)
        raise ConfigError([Problem("", f"{where}: {p}") for p in error.problems]) from None


def _numbered(config: RunConfig, index: int) -> RunConfig:
    """Give a run of a sweep a folder of its own below the sweep's."""
    if config.run_dir != "auto":
        return dataclasses.replace(config, run_dir=str(Path(config.run_dir) / str(index)))
    name = config.name if config.name != "auto" else f"{default_name(config)}-sweep"
    return dataclasses.replace(config, name=f"{name}/{index}")
