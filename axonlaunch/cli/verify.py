"""``axonlaunch verify``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.options import ConfigDir, ConfigName, Json, Overrides, preloads, print_json
from axonlaunch.launch.output.spinner import spinner

if TYPE_CHECKING:
    from rich.console import Console

    from axonlaunch.verification.result import ParityResult

HELP = "Check numerical parity with a single process."
EXAMPLES = """Examples:

\b
  axonlaunch verify strategy=hybrid
  axonlaunch verify strategy=fsdp model=llama_debug train.precision=bf16 --steps 8
  axonlaunch verify strategy=pipeline launch.backend=gloo    (real processes)
"""
MAX_SHOWN_PARAMETERS = 8


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 4,
    as_json: Json = False,
) -> None:
    """Check numerical parity with a single process."""
    from axonlaunch.system import forkserver

    with forkserver.warm(preload=preloads(overrides)) as context:
        from rich.console import Console

        from axonlaunch.system.strict_json import finite
        from axonlaunch.verification.runner import verify

        with spinner("running the layout and a single process"):
            verdict = verify(
                context,
                overrides or [],
                config_name=config_name,
                config_dirs=config_dir or [],
                steps=steps,
            )
    if as_json:
        print_json(finite(asdict(verdict)))
    else:
        _show(verdict, Console(file=sys.stdout, highlight=False))
    raise typer.Exit(0 if verdict.passed else 1)


def _show(verdict: ParityResult, console: Console) -> None:
    from rich.table import Table

    from axonlaunch.verification.result import norm_tolerance

    steps = "1 step" if verdict.steps == 1 else f"{verdict.steps} steps"
    console.print(f"{verdict.layout} vs. single process, {steps}", markup=False)
    if verdict.failure is None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("")
        table.add_column("largest difference", justify="right")
        table.add_column("tolerance", justify="right")
        tolerance = verdict.tolerance
        for name, value, passing in (
            ("losses", verdict.max_loss_difference, tolerance),
            ("gradients", verdict.max_gradient_difference, tolerance),
            ("gradient norms", verdict.max_norm_difference, norm_tolerance(tolerance)),
            ("parameters", verdict.max_parameter_difference, tolerance),
        ):
            table.add_row(name, f"{value:.1e}", f"{passing:.0e}")
        console.print(table)
        console.print(f"worst parameter  {verdict.worst_parameter}", markup=False)
    else:
        console.print(verdict.failure, markup=False, soft_wrap=True)
    for line in verdict.differences[:MAX_SHOWN_PARAMETERS]:
        console.print(line, markup=False, soft_wrap=True)
    if len(verdict.differences) > MAX_SHOWN_PARAMETERS:
        console.print(f"and {len(verdict.differences) - MAX_SHOWN_PARAMETERS} more")
    console.print("[green]passed[/green]" if verdict.passed else "[red]failed[/red]")
