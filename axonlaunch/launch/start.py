"""From a command's overrides to runs: one, or a sweep's, in turn.

It chooses the launcher; the launcher does the work.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import Composer, ConfigError, Problem, RunConfig
from axonlaunch.launch import forkserver, local, run_folder


def start(
    context: ForkServerContext,
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
    configs = checked(
        context,
        overrides,
        config_name=config_name,
        config_dirs=config_dirs,
        multirun=multirun,
    )
    summaries = []
    for config in configs:
        status, summary = local.train(config, context, started=started, as_json=as_json)
        summaries.append(summary)
        if status:
            break
        started = time.time()
    return status, summaries


def checked(
    context: ForkServerContext,
    overrides: Sequence[str],
    *,
    config_name: str,
    config_dirs: Sequence[Path],
    multirun: bool,
) -> list[RunConfig]:
    """Return what a command line asks for, checked as far as that goes without a rank.

    Raises:
        ConfigError: A configuration can't be run.
    """
    batches = [list(overrides)]
    if multirun:
        batches = Composer(config_dirs=config_dirs).sweep(overrides)
    told = multirun and len(batches) > 1
    load = partial(configuration.load, config_name=config_name, config_dirs=config_dirs)
    configs = [_checked(partial(load, batch), batch, told) for batch in batches]
    configs = _numbered(configs) if multirun else configs
    resolve = partial(forkserver.call, context, "axonlaunch.preflight:resolve")
    return [
        _checked(partial(resolve, config), batch, told)
        for config, batch in zip(configs, batches, strict=True)
    ]


def _checked(
    make: Callable[[], RunConfig], overrides: list[str], is_one_of_several: bool
) -> RunConfig:
    """Make a configuration; of several, say which one is wrong."""
    try:
        return make()
    except ConfigError as error:
        if not is_one_of_several:
            raise
        where = " ".join(overrides)
        raise ConfigError([Problem("", f"{where}: {p}") for p in error.problems]) from None


def _numbered(configs: list[RunConfig]) -> list[RunConfig]:
    """Give each run of a sweep a folder of its own: its own name's, else numbered ones.

    Raises:
        ConfigError: Some runs, not all, share a name or a folder.
    """
    named = {(config.name, config.run_dir) for config in configs}
    if len(named) == len(configs) > 1:
        return configs
    first = configs[0]
    if len(named) > 1:
        message = "some runs of the sweep share it; name all alike, or each for itself"
        raise ConfigError([Problem("name", message, first.name)])
    name, parent = first.name, first.run_dir
    if name == parent == "auto":
        name = run_folder.free_name(f"{first.model.name}-sweep")
    name = Path(parent).name if name == "auto" else name
    parent = str(Path("runs", name)) if parent == "auto" else parent
    return [
        dataclasses.replace(config, name=f"{name}/{index}", run_dir=str(Path(parent, str(index))))
        for index, config in enumerate(configs)
    ]
