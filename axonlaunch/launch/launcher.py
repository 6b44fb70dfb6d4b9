"""The launchers by name: what checks a configuration, and what makes a run of it.

It holds names alone, and imports none of what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any, TypeAlias, cast

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import nodes
from axonlaunch.registry import load


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the command that launches a run was given.

    Attributes:
        context: Of the warm fork server.
        started: ``time.time()`` when the command, or in a sweep this run, began.
        as_json: Keep standard output free; the console goes to standard error.
        render: Print what would be submitted, and submit nothing.
        again: What is to be added to the command to resume the run; None: the run's name.
    """

    context: ForkServerContext
    started: float
    as_json: bool = False
    render: bool = False
    again: str | None = None


Launch: TypeAlias = Callable[[RunConfig, LaunchOptions], tuple[int, dict[str, Any] | None]]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What makes runs of configurations; its functions are named, ``"module:function"``.

    Attributes:
        check: Takes a configuration and ``LaunchOptions``; returns the configuration, checked and
            complete, or raises ``ConfigError``. Called for all runs of a command before ``launch``
            is for the first.
        launch: Takes what ``check`` returned and ``LaunchOptions``; returns the exit status and
            the run's summary, None where another process has it.
        on_this_node: Whether ``launch`` runs all ranks here, to their end: runs that are finished
            are then passed over, and those of a sweep compared.
        sweeps: Whether it can launch more than one run of a command.
        renders: Whether ``launch`` can print what it would submit, and submit nothing.
    """

    check: str
    launch: str
    on_this_node: bool = False
    sweeps: bool = True
    renders: bool = False


LAUNCHERS = {
    "local": Launcher(
        check="axonlaunch.launch.local.launcher:check",
        launch="axonlaunch.launch.local.launcher:launch",
        on_this_node=True,
    ),
    "multinode": Launcher(
        check="axonlaunch.launch.multinode.launcher:check",
        launch="axonlaunch.launch.multinode.launcher:launch",
        sweeps=False,
    ),
    "slurm": Launcher(
        check="axonlaunch.launch.slurm:check",
        launch="axonlaunch.launch.slurm:launch",
        renders=True,
    ),
}


def launcher_of(config: RunConfig) -> str:
    """Return the name of the launcher of a run whose environment was applied to it."""
    if config.launch.name in LAUNCHERS and config.launch.name != "local":
        return config.launch.name
    return "multinode" if nodes(config)[1] > 1 else "local"


def launch_function(config: RunConfig) -> Launch:
    """Import and return what launches a run."""
    return cast("Launch", load(LAUNCHERS[launcher_of(config)].launch))
