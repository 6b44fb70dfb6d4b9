"""Looks up launchers by name: the functions that check a configuration and launch a run.

Functions are referred to by name and imported only when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any, TypeAlias, cast

from axonlaunch.config import Composed, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import nodes
from axonlaunch.config.options.launch import LAUNCHERS, LaunchConfig, Launcher
from axonlaunch.config.values.optional_keys import num_data_workers
from axonlaunch.launch.environment.environment_variables import UNKNOWN_LAUNCH, LaunchIdentity
from axonlaunch.system.processes import forked_call
from axonlaunch.system.processes.targets import load_target
from axonlaunch.verification.result import Proof


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options with which a command launches its runs.

    Attributes:
        fork_server: Context of the warm fork server.
        started: ``time.time()`` at the start of the command, or of this run in a sweep.
        as_json: Whether standard output is reserved for JSON; the console then writes to standard
            error.
        render: Whether to print the script that would be submitted instead of submitting it.
        dry_run: Whether only ``check`` is called, which then reports the errors of ``launch`` too.
        composed: Composed files, overrides and environment of the run; None if no command launches
            the run.
        proof: Proof of the run's layout; None if no proof was requested.
        command: Words of the command that launched the run; empty for a script.
        resumed_name: Name with which the command resumes the run; None for the run's, empty if the
            command has the names of its runs.
        identity: Identity of the run across its starts by a launcher or scheduler.
        show: Receives a text that describes the current work, to show while the user waits.
    """

    fork_server: ForkServerContext
    started: float
    as_json: bool = False
    render: bool = False
    dry_run: bool = False
    command: Sequence[str] = ()
    resumed_name: str | None = None
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
"""Launcher of a run on several nodes; every node has ``launch.name`` set to ``auto`` or ``env``."""


def launcher_of(config: RunConfig) -> str:
    """Return the name of a run's launcher. The environment must have been applied already."""
    name = config.launch.name
    if name != _LOCAL and LAUNCHERS.entry(name).facts is not None:
        return name
    return _MULTINODE if nodes(config)[1] > 1 else _LOCAL


def launcher(name: str) -> Launcher:
    """Return the functions and properties of a launcher."""
    return _MULTINODE_LAUNCHER if name == _MULTINODE else LAUNCHERS.facts(name)


def check_function(config: RunConfig) -> Check:
    """Import and return the function that checks a run."""
    return cast("Check", _import_function(launcher(launcher_of(config)).check))


def launch_function(config: RunConfig) -> Launch:
    """Import and return the function that launches a run."""
    return cast("Launch", _import_function(launcher(launcher_of(config)).launch))


def _import_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    target: Callable[..., Any] = load_target(function) if isinstance(function, str) else function
    return target


RESOLVED_SETTINGS = ("node_rank", "master_addr", "master_port", "token_file")
"""Settings of ``launch`` that differ between nodes or are known only when a job starts."""


def submission_issues(
    launch: LaunchConfig,
    *,
    target: str,
    run: str,
    node: str,
    origin: str,
    resolved: Sequence[str] = RESOLVED_SETTINGS,
) -> Iterator[ConfigIssue]:
    """Yield problems of settings that every run on other nodes needs, or must leave out.

    Args:
        launch: Group ``launch`` of the configuration.
        target: Noun for messages: a job, task or cluster.
        run: The run in words.
        node: Noun for a node.
        origin: Source of the resolved settings.
        resolved: Settings of ``launch`` that each node gets when it starts.
    """
    if launch.nproc == "auto":
        message = f"is required for a {target}; write the number of devices per {node}"
        yield ConfigIssue("launch.nproc", message, "auto")
    if not isinstance(launch.nnodes, int):
        message = f"{run} has a fixed number of {node}s; write one number"
        yield ConfigIssue("launch.nnodes", message, launch.nnodes)
    if launch.backend == "mock":
        message = "its ranks are threads of one process; use auto, gloo or nccl"
        yield ConfigIssue("launch.backend", message, "mock")
    for key in resolved:
        value = getattr(launch, key)
        if value not in ("auto", None):
            yield ConfigIssue(f"launch.{key}", f"{origin}; remove this setting", value)


def used_cores(config: RunConfig) -> int:
    """Return the number of cores that the ranks of a node and their data workers use."""
    launch = config.launch
    assert launch.nproc != "auto"
    threads = 1 if launch.threads == "auto" else launch.threads
    return launch.nproc * (threads + num_data_workers(config.data))


def check_anywhere(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Run the checks that apply to every node with the run's devices.

    Raises:
        ConfigError: No such node can run the configuration.
    """
    checked: RunConfig = forked_call.call(
        options.fork_server,
        "axonlaunch.preflight.checks:resolve_anywhere",
        config,
        task="checking the configuration",
    )
    return checked
