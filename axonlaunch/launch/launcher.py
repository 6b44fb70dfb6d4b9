"""The launchers by name: what checks a configuration, and what makes a run of it.

It holds names alone, and imports none of what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any, TypeAlias, cast

from axonlaunch.config import Composed, RunConfig
from axonlaunch.config.launch import LAUNCHERS, Launcher
from axonlaunch.config.layout import nodes
from axonlaunch.launch.environment_variables import UNKNOWN_LAUNCH, LaunchIdentity
from axonlaunch.system import forked_call
from axonlaunch.system.targets import load_target
from axonlaunch.verification.result import Proof


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a command asks for its runs to be launched.

    Attributes:
        context: Of the warm fork server.
        started: ``time.time()`` when the command, or in a sweep this run, began.
        as_json: Keep standard output free; the console goes to standard error.
        render: Print what would be submitted, and submit nothing.
        dry_run: Check alone: ``launch`` is not called, and what it would refuse, ``check`` does.
        composed: What the run's files, overrides and environment say; None: it is not launched
            by a command.
        proof: What is known of the run's layout; None: nobody asked for it.
        again: What is to be added to the command to resume the run; None: the run's name.
        identity: What is the same in all starts of the run by its launcher or scheduler.
        show: Takes what is being done, as text for the user who waits.
    """

    context: ForkServerContext
    started: float
    as_json: bool = False
    render: bool = False
    dry_run: bool = False
    again: str | None = None
    composed: Composed | None = None
    proof: Proof | None = None
    identity: LaunchIdentity = UNKNOWN_LAUNCH
    show: Callable[[str], None] = lambda text: None


Check: TypeAlias = Callable[[RunConfig, LaunchOptions], RunConfig]
Launch: TypeAlias = Callable[[RunConfig, LaunchOptions], tuple[int, dict[str, Any] | None]]


_LOCAL, _MULTINODE = "local", "multinode"
_MULTINODE_LAUNCHER = Launcher(
    check="axonlaunch.launch.multinode.launcher:check",
    launch="axonlaunch.launch.multinode.launcher:launch",
    sweeps=False,
)
"""What a run on several nodes has, whose name is ``auto`` or ``env`` on each."""


def launcher_of(config: RunConfig) -> str:
    """Return the name of the launcher of a run whose environment was applied to it."""
    name = config.launch.name
    if name != _LOCAL and LAUNCHERS.entry(name).facts is not None:
        return name
    return _MULTINODE if nodes(config)[1] > 1 else _LOCAL


def launcher(name: str) -> Launcher:
    """Return what checks and launches the runs of a launcher of that name."""
    return _MULTINODE_LAUNCHER if name == _MULTINODE else LAUNCHERS.facts(name)


def check_function(config: RunConfig) -> Check:
    """Import and return what checks a run."""
    return cast("Check", _import_function(launcher(launcher_of(config)).check))


def launch_function(config: RunConfig) -> Launch:
    """Import and return what launches a run."""
    return cast("Launch", _import_function(launcher(launcher_of(config)).launch))


def _import_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    target: Callable[..., Any] = load_target(function) if isinstance(function, str) else function
    return target


def check_anywhere(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Check a run by what holds on every node that has its devices.

    Raises:
        ConfigError: It can't be run there.
    """
    checked: RunConfig = forked_call.call(
        options.context,
        "axonlaunch.preflight.checks:resolve_anywhere",
        config,
        task="checking the configuration",
    )
    return checked
