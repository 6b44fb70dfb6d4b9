"""``axonlaunch train``."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.planning.estimate import (
    estimate_to_json,
    print_estimate,
    show_remedies,
)
from axonlaunch.cli.shared.options import (
    STARTED,
    ConfigDir,
    ConfigName,
    Json,
    Overrides,
    print_json,
    problems_to_json,
)
from axonlaunch.launch.local.preload_rules import preloads
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    from rich.console import Console

    from axonlaunch.launch.commands.dry_run import DryRun
    from axonlaunch.launch.commands.node_shares import NodeShare
    from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
    from axonlaunch.launch.launcher import LaunchOptions
    from axonlaunch.launch.request import Request
    from axonlaunch.launch.runs import Run, RunResult

MOST_SAMPLES = 1000
"""Largest number of runs of a sweep."""
HELP = "Train a model."
EXAMPLES = """Examples:

\b
  axonlaunch train +strategy=fsdp
  axonlaunch train strategy=ddp model=llama_debug launch.nproc=4
  axonlaunch train data=text 'data.files=["notes/*.md"]' name=notes
  axonlaunch train strategy=fsdp hardware=a100_80gb --dry-run
  axonlaunch train launch=slurm launch.nnodes=4 launch.nproc=8 \\
      launch.slurm.partition=gpu --render
  axonlaunch train -m optimizer.lr=1e-3,3e-3 model.num_hidden_layers=2,4
  axonlaunch train -m --samples 8 'optimizer.lr=tag(log,interval(1e-4,1e-2))'
  axonlaunch train -m --parallel 4 optimizer.lr=1e-4,3e-4,1e-3,3e-3
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    multirun: Annotated[
        bool,
        typer.Option(
            "-m",
            "--multirun",
            help="Sweep: run every combination of comma-separated values, one after another.",
        ),
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=MOST_SAMPLES,
            help="With -m: N runs drawn at random from values, ranges and interval(LOW,HIGH).",
            show_default=False,
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With -m: train N runs at once, each on a share of this node's devices and cores, "
            "or as a job.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check the configuration and estimate memory; do not launch."
        ),
    ] = False,
    render: Annotated[
        bool,
        typer.Option("--render", help="Print the job for SLURM or a cluster; do not submit it."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model."""
    from axonlaunch.launch.environment.environment_variables import may_be_rank
    from axonlaunch.system.node import limits
    from axonlaunch.system.processes import forkserver
    from axonlaunch.system.text import streams

    _check_options(
        is_sweep=multirun, samples=samples, parallel=parallel, launches=not (dry_run or render)
    )
    requested: dict[str, Any] = {  # arguments of Request, which is imported below
        "overrides": overrides or [],
        "config_name": config_name,
        "config_dirs": config_dir or [],
        "multirun": multirun,
        "samples": samples,
        "parallel": parallel,
    }
    if dry_run:
        raise typer.Exit(_dry_run(requested, renders=render, as_json=as_json))
    limits.allow_open_files()
    # A run continues after its console is closed.
    sys.stdout, sys.stderr = streams.tolerant(sys.stdout), streams.tolerant(sys.stderr)
    with forkserver.on_demand(preload=preloads(overrides, traces=False)) as server:
        if not may_be_rank(os.environ):
            server()
        # Import these now, while the server imports torch on another core.
        from axonlaunch.launch.environment.accelerators import count_accelerators
        from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
        from axonlaunch.launch.environment.launcher_process import LauncherProcess
        from axonlaunch.launch.launcher import LaunchOptions
        from axonlaunch.launch.request import Request
        from axonlaunch.launch.runs import print_comparison

        request = Request(**requested)
        environment = ClusterEnvironment.detect(os.environ)
        request.refuse_sweep_under(environment)
        launcher = LauncherProcess(environment.launcher)
        launcher.watch()  # before importing torch, which takes seconds
        is_rank = environment.is_rank(
            partial(request.compose, request.overrides),
            accelerators=partial(count_accelerators, server),
        )
        if is_rank:
            from axonlaunch.launch.external.entry import be_rank

            status, summary = be_rank(
                request, environment, launcher, server=server, started=STARTED, as_json=as_json
            )
            summaries = [summary] if summary else []
        else:
            options = LaunchOptions(
                fork_server=server(),
                started=STARTED,
                as_json=as_json,
                render=render,
                identity=launcher.identity,
            )
            runs, shares = _prepare_runs(request, environment.for_node(), options)
            results: list[RunResult] = []
            if shares:
                from axonlaunch.launch.commands.parallel_sweep import launch_at_once

                results = launch_at_once(runs, shares, request)
            else:
                for run in runs:
                    results.append(run.launch())
                    if results[-1].is_last:
                        break
            print_comparison(runs, results)
            status = _status_of([result.status for result in results])
            summaries = [result.summary for result in results if result.summary is not None]
    if as_json:
        if multirun:
            print_json({"runs": summaries})
        elif summaries:  # only the first process of a run has a summary
            print_json(summaries[0])
    raise typer.Exit(status)


def _check_options(
    *, is_sweep: bool, samples: int | None, parallel: int | None, launches: bool
) -> None:
    """Refuse options of sweeps without a sweep, and of launches without a launch.

    Raises:
        ConfigError: An option would have no effect.
    """
    from axonlaunch.config import ConfigError, ConfigIssue

    problems = []
    if samples is not None and not is_sweep:
        problems.append(ConfigIssue("--samples", "draws the runs of a sweep; add -m", samples))
    if parallel is not None and not is_sweep:
        problems.append(ConfigIssue("--parallel", "trains runs of a sweep; add -m", parallel))
    elif parallel is not None and not launches:
        message = "limits how many runs train at once, and none is launched; leave it out"
        problems.append(ConfigIssue("--parallel", message, parallel))
    if problems:
        raise ConfigError(problems)


def _prepare_runs(
    request: Request, environment: ClusterEnvironment, options: LaunchOptions
) -> tuple[list[Run], list[NodeShare]]:
    """Compose and check the runs of a command line.

    Returns:
        The runs, and the shares of this node for those that train at once; no shares if they train
        one after another.

    Raises:
        ConfigError: A run can't be launched.
    """
    from axonlaunch.launch.runs import load_runs, prepare_runs

    # The first process of a container ignores signals without a handler. Ranks save first: their
    # supervisor has another handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Hide torch's warnings about unknown connections to its store. Ranks still print theirs,
    # because the server started before.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    runs = load_runs(request, environment, options)
    shares: list[NodeShare] = []
    if request.parallel is not None:
        from axonlaunch.launch.commands.parallel_sweep import share_node

        runs, shares = share_node(
            runs, at_once=request.parallel, server=lambda: options.fork_server
        )
    return prepare_runs(runs), shares


def _status_of(statuses: Sequence[int]) -> int:
    """Return the exit status of a sweep: that of the first failed run, 75 last."""
    from axonlaunch.config.problems.errors import TRANSIENT

    failed = [status for status in statuses if status]
    return next((status for status in failed if status != TRANSIENT), failed[0] if failed else 0)


def _dry_run(requested: dict[str, Any], *, renders: bool, as_json: bool) -> int:
    """Print the memory estimate of each run, and the problems that would stop it on this node.

    Args:
        requested: Arguments of ``Request``.
        renders: Whether the command prints jobs, so that the checks of a submission are left out.
        as_json: Whether to print one JSON object.

    Returns:
        The exit status of a launch that fails; 0 if none would.

    Raises:
        ConfigError: A configuration can't be run on any node.
    """
    from axonlaunch.config.problems.errors import exit_status
    from axonlaunch.system.processes import forkserver

    with forkserver.warm(preload=preloads(requested["overrides"])) as context:
        from axonlaunch.launch.commands.dry_run import dry_runs
        from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
        from axonlaunch.launch.launcher import LaunchOptions
        from axonlaunch.launch.request import Request

        request = Request(**requested)
        environment = ClusterEnvironment.detect(os.environ)
        request.refuse_sweep_under(environment)
        with spinner("tracing a step") as show:
            options = LaunchOptions(
                fork_server=context, started=STARTED, render=renders, dry_run=True, show=show
            )
            runs = dry_runs(request, environment.for_node(), options)
        obstacles = [obstacle for run in runs for obstacle in run.obstacles]
        status = exit_status(obstacles) if obstacles else 0
        if as_json:
            reports = [_to_json_dict(run, context) for run in runs]
            print_json({"runs": reports} if request.multirun else reports[0])
            return status
        console = console_on()
        for number, run in enumerate(runs):
            if number:
                console.print()
            print_estimate(run.forecast, console)
            show_remedies(context, run.config, run.forecast, console)
            if run.proof is not None:
                console.print(f"\nbefore the first step {run.proof}", markup=False, soft_wrap=True)
            _show_obstacles(run, console)
        _show_elsewhere(runs, request.overrides, console)
        return status


def _to_json_dict(run: DryRun, context: ForkServerContext) -> dict[str, Any]:
    from axonlaunch.planning.estimate import with_changes

    estimate = estimate_to_json(with_changes(context, run.config, run.forecast))
    proof = None if run.proof is None else asdict(run.proof)
    obstacles = problems_to_json(run.obstacles)
    return {**estimate, "proof": proof, "obstacles": obstacles, "finished": run.finished or None}


def _show_obstacles(run: DryRun, console: Console) -> None:
    """Print the problems that would stop a launch on this node, with their remedies."""
    from rich.text import Text

    console.print()
    if not run.obstacles:
        passed = "This node passes all checks before a launch."
        console.print(run.finished or passed, markup=False, soft_wrap=True)
        return
    console.print(Text("This node cannot run it:", style="bold"))
    for problem in run.obstacles:
        filled = textwrap.wrap(str(problem), console.width - 2, break_on_hyphens=False)
        console.print(textwrap.indent("\n".join(filled), "  "), markup=False)


def _show_elsewhere(runs: Sequence[DryRun], overrides: Sequence[str], console: Console) -> None:
    """Print commands that do not depend on this node, if this node cannot run it."""
    if not any(run.obstacles for run in runs):
        return
    arguments = shlex.join(overrides)
    console.print()
    if all(run.forecast.hardware is None for run in runs):
        options = "axonlaunch ls hardware lists devices"
        console.print(f"Add hardware=h100_80gb to see whether it fits ({options}).")
    console.print("To estimate memory without checks of this node:")
    console.print(f"  axonlaunch estimate {arguments}".rstrip(), markup=False, soft_wrap=True)
