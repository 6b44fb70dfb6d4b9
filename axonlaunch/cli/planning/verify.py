"""``axonlaunch verify``."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import ConfigDir, ConfigName, Json, Overrides, print_json
from axonlaunch.cli.shared.output_files import writing
from axonlaunch.launch.local.preload_rules import preloads
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from axonlaunch.verification.result import ParityResult

HELP = "Check that a layout computes what a single process does."
EXAMPLES = """Examples:

\b
  axonlaunch verify strategy=hybrid
  axonlaunch verify strategy=fsdp model=llama_debug train.precision=bf16 \\
      --steps 8
  axonlaunch verify strategy=pipeline launch.backend=gloo  (real processes)
  axonlaunch verify strategy=ddp --features                (list features)
  axonlaunch verify strategy=tensor --dump /tmp/sides      (save tensors)
"""
MAX_SHOWN_PARAMETERS = 8


_SHOWN = {
    "rate": "learning rates",
    "loss": "losses",
    "gradient": "gradients",
    "sum": "sums of gradients",
    "norm": "gradient norms",
    "parameter": "parameters",
    "buffer": "buffers",
    "state": "optimizer states",
    "evaluation": "evaluation",
    "prediction": "prediction",
    "checkpoint": "checkpoint, read by one process",
}
"""Kinds of compared quantities, in the order of the table."""


class ReferencePrecision(StrEnum):
    """Precision in which the single process computes (``--reference``)."""

    AS_CONFIGURED = "train.precision"
    FP64 = "fp64"


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    steps: Annotated[
        int,
        typer.Option("--steps", metavar="N", min=1, help="Number of optimizer steps to compare."),
    ] = 6,
    reference: Annotated[
        ReferencePrecision,
        typer.Option(
            "--reference",
            metavar="PRECISION",
            help="Precision of the single process: train.precision or fp64.",
        ),
    ] = ReferencePrecision.AS_CONFIGURED,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump",
            metavar="FOLDER",
            file_okay=False,
            help="Save the tensors of each module in the first two steps, from both sides.",
        ),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="List which features were tested and which not.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that a layout computes the same numbers as a single process."""
    from axonlaunch.system.processes import forkserver

    if dump is not None:
        with writing("--dump", dump):
            dump.mkdir(parents=True, exist_ok=True)
    with forkserver.warm(preload=preloads(overrides)) as context:
        from axonlaunch.config import compose
        from axonlaunch.planning.auto_strategy import load_auto_strategy
        from axonlaunch.system.storage.strict_json import finite
        from axonlaunch.verification.proofs.runner import verify

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
    for feature, coverage in verdict.features.items() if features else ():
        console.print(f"{feature:15}  {coverage}", markup=False, soft_wrap=True)
    for line in verdict.notes:
        console.print(line, markup=False, soft_wrap=True)
    for line in verdict.differences[:MAX_SHOWN_PARAMETERS]:
        console.print(line, markup=False, soft_wrap=True)
    if len(verdict.differences) > MAX_SHOWN_PARAMETERS:
        console.print(f"and {len(verdict.differences) - MAX_SHOWN_PARAMETERS} more")
    if verdict.first_difference:
        text = f"first difference: {verdict.first_difference}"
        console.print(text, markup=False, soft_wrap=True)
    if verdict.verdict == "nothing proved":
        console.print(f"[red]nothing proved[/red]: {verdict.reason}", soft_wrap=True)
    else:
        console.print("[green]passed[/green]" if verdict.passed else "[red]failed[/red]")


def _table(verdict: ParityResult) -> Table:
    """Return a table of the largest difference and the tolerance of each kind of quantity."""
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
    """Return how many parameters the comparison covers, and the names of the others."""
    counts = (
        f"{verdict.parameters_with_gradient} of {verdict.parameters} parameters got a gradient, "
        f"{verdict.parameters_moved} changed"
    )
    if verdict.frozen_parameters:
        counts += f"; {len(verdict.frozen_parameters)} are frozen and have no gradient"
    names = verdict.unproved_parameters
    if not names:
        return counts
    more = ", ..." if len(names) > MAX_SHOWN_PARAMETERS else ""
    return f"{counts}; not proved: {', '.join(names[:MAX_SHOWN_PARAMETERS])}{more}"
