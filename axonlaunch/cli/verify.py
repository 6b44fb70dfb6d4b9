"""``axonlaunch verify``."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.early_server import preloads
from axonlaunch.cli.options import ConfigDir, ConfigName, Json, Overrides, print_json
from axonlaunch.cli.output_files import writing
from axonlaunch.launch.output.spinner import spinner
from axonlaunch.system.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from axonlaunch.verification.result import ParityResult

HELP = "Check numerical parity with a single process."
EXAMPLES = """Examples:

\b
  axonlaunch verify strategy=hybrid
  axonlaunch verify strategy=fsdp model=llama_debug train.precision=bf16 \\
      --steps 8
  axonlaunch verify strategy=pipeline launch.backend=gloo  (real processes)
  axonlaunch verify strategy=ddp --features                (what it exercised)
  axonlaunch verify strategy=tensor --dump /tmp/sides      (keep tensors)
"""
MAX_SHOWN_PARAMETERS = 8


_SHOWN = {
    "rate": "learning rates",
    "loss": "losses",
    "gradient": "gradients",
    "norm": "gradient norms",
    "parameter": "parameters",
    "buffer": "buffers",
    "state": "optimizer states",
    "evaluation": "evaluation",
    "prediction": "prediction",
    "checkpoint": "checkpoint, read by one process",
}
"""Kinds of quantities, in the order of the table."""


class ReferencePrecision(StrEnum):
    """What the single process computes in."""

    AS_CONFIGURED = "train.precision"
    FP64 = "fp64"


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 6,
    reference: Annotated[
        ReferencePrecision, typer.Option("--reference", help="Arithmetic of the single process.")
    ] = ReferencePrecision.AS_CONFIGURED,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump",
            metavar="FOLDER",
            file_okay=False,
            help="Keep both sides of the first two steps as safetensors, module by module.",
        ),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="List what was exercised, and what was not.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check numerical parity with a single process."""
    from axonlaunch.system import forkserver

    if dump is not None:
        with writing("--dump", dump):
            dump.mkdir(parents=True, exist_ok=True)
    with forkserver.warm(preload=preloads(overrides)) as context:
        from axonlaunch.config import compose
        from axonlaunch.planning.auto_strategy import load_auto_strategy
        from axonlaunch.system.strict_json import finite
        from axonlaunch.verification.runner import verify

        folders = config_dir or []
        with spinner("running the layout and a single process"):
            _, config = load_auto_strategy(
                overrides or [],
                compose=partial(compose, config_name=config_name, config_dirs=folders),
                server=lambda: context,
                config_dirs=folders,
            )
            verdict = verify(
                context,
                config,
                steps=steps,
                fp64=reference is ReferencePrecision.FP64,
                dump=dump,
            )
    if as_json:
        print_json(finite(asdict(verdict)))
    else:
        _show(verdict, console_on(), features=features)
    raise typer.Exit(0 if verdict.passed else 1)


def _show(verdict: ParityResult, console: Console, *, features: bool) -> None:
    steps = "1 step" if verdict.steps == 1 else f"{verdict.steps} steps"
    console.print(f"{verdict.layout} vs. single process, {steps}", markup=False)
    if verdict.failure is None:
        console.print(_table(verdict))
        console.print(_coverage_text(verdict), markup=False, soft_wrap=True)
    else:
        console.print(verdict.failure, markup=False, soft_wrap=True)
    for feature, how in verdict.features.items() if features else ():
        console.print(f"{feature:15}  {how}", markup=False, soft_wrap=True)
    for line in verdict.notes:
        console.print(line, markup=False, soft_wrap=True)
    for line in verdict.differences[:MAX_SHOWN_PARAMETERS]:
        console.print(line, markup=False, soft_wrap=True)
    if len(verdict.differences) > MAX_SHOWN_PARAMETERS:
        console.print(f"and {len(verdict.differences) - MAX_SHOWN_PARAMETERS} more")
    if verdict.first_difference:
        text = f"the first module that differs is {verdict.first_difference}"
        console.print(text, markup=False, soft_wrap=True)
    if verdict.verdict == "nothing proved":
        console.print(f"[red]nothing proved[/red]: {verdict.reason}", soft_wrap=True)
    else:
        console.print("[green]passed[/green]" if verdict.passed else "[red]failed[/red]")


def _table(verdict: ParityResult) -> Table:
    """Return the largest difference of each kind of quantity, and what passes there."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("largest difference", justify="right")
    table.add_column("tolerance", justify="right")
    for kind, name in _SHOWN.items():
        if kind in verdict.max_differences:
            value, passing = verdict.max_differences[kind], verdict.tolerances[kind]
            table.add_row(name, f"{value:.1e}", f"{passing:.0e}")
    return table


def _coverage_text(verdict: ParityResult) -> str:
    """Say how many parameters the comparison says something about, and which it does not."""
    proved = (
        f"{verdict.parameters_with_gradient} of {verdict.parameters} parameters got a gradient, "
        f"{verdict.parameters_moved} moved"
    )
    if verdict.frozen_parameters:
        proved += f"; {len(verdict.frozen_parameters)} are frozen, and have no gradient to compare"
    names = verdict.unproved_parameters
    if not names:
        return proved
    more = ", ..." if len(names) > MAX_SHOWN_PARAMETERS else ""
    return f"{proved}; not {', '.join(names[:MAX_SHOWN_PARAMETERS])}{more}"
