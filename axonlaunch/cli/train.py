"""``axonlaunch train``."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from axonlaunch.cli.estimate import as_object, show
from axonlaunch.cli.options import (
    STARTED,
    ConfigDir,
    ConfigName,
    Json,
    Overrides,
    print_json,
    print_problems,
)
from axonlaunch.launch.telling import telling

HELP = "Train a model."
EXAMPLES = """Examples:

\b
  axonlaunch train +strategy=fsdp
  axonlaunch train strategy=ddp model=llama_debug launch.nproc=4
  axonlaunch train data=text 'data.files=["notes/*.md"]' name=notes
  axonlaunch train strategy=fsdp hardware=a100_80gb --dry-run
  axonlaunch train launch=slurm launch.nnodes=4 launch.nproc=8 launch.partition=gpu --render
  axonlaunch train -m optimizer.lr=1e-3,3e-3 model.num_hidden_layers=2,4
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Run every combination of a=1,2, in turn.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and estimate alone; start nothing.")
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Print the script of a SLURM job; start nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model."""
    from axonlaunch.launch import forkserver, streams
    from axonlaunch.launch.variables import may_be_rank

    if dry_run:
        _estimate(overrides or [], config_dir or [], config_name, multirun, as_json)
        return
    # A run outlives its console.
    sys.stdout, sys.stderr = streams.tolerant(sys.stdout), streams.tolerant(sys.stderr)
    with ExitStack() as stack:
        context = None
        if not may_be_rank(os.environ):
            context = stack.enter_context(forkserver.warm())
        # Imported only now, while the server imports torch on another core.
        from axonlaunch.launch.start import start

        status, summaries = start(
            context,
            overrides or [],
            config_name=config_name,
            config_dirs=config_dir or [],
            multirun=multirun,
            started=STARTED,
            as_json=as_json,
            render=render,
        )
    if as_json:
        if multirun:
            print_json({"runs": summaries})
        elif summaries:  # of the run's processes, the first alone has one
            print_json(summaries[0])
    raise typer.Exit(status)


def _estimate(
    overrides: list[str], config_dirs: list[Path], config_name: str, multirun: bool, as_json: bool
) -> None:
    """Check what would be run, and tell what it would hold.

    Raises:
        ConfigError: Something can't be run.
    """
    from axonlaunch.launch import forkserver

    with forkserver.warm() as context:
        from rich.console import Console

        from axonlaunch.launch.estimate import forecast, misfit
        from axonlaunch.launch.start import checked

        with telling("tracing a step"):
            configs = checked(
                context,
                overrides,
                config_name=config_name,
                config_dirs=config_dirs,
                multirun=multirun,
            )
            found = [forecast(context, config) for config in configs]
    if as_json:
        told = [as_object(one) for one in found]
        print_json({"runs": told} if multirun else told[0])
    else:
        console = Console(file=sys.stdout, highlight=False)
        for number, one in enumerate(found):
            if number:
                console.print()
            show(one, console)
    if problems := [problem for one in found if (problem := misfit(one))]:
        print_problems(problems, as_json=False)  # the object says that it does not fit
        raise typer.Exit(2)
