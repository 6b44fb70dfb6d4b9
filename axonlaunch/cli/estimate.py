"""``axonlaunch estimate``."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.options import ConfigDir, ConfigName, Json, Overrides, print_json
from axonlaunch.launch.telling import telling

if TYPE_CHECKING:
    from rich.console import Console

    from axonlaunch.planning.record import Forecast

HELP = "Foretell the memory of every rank. No GPU, no data, a world of any size."
EXAMPLES = """Examples:

\b
  axonlaunch estimate strategy=fsdp
  axonlaunch estimate experiment=llama3_8b launch.nproc=64 hardware=h100_80gb
  axonlaunch estimate strategy=hybrid model=llama_debug launch.nproc=512 \\
      train.global_batch_size=512 --plot memory.svg
"""


def command(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "config",
    exact: Annotated[
        bool, typer.Option("--exact", help="Trace every layer and micro-batch, also those alike.")
    ] = False,
    formula: Annotated[
        bool,
        typer.Option(
            "--formula", help="Trace nothing: states alone, of a model that can't be traced."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw a picture, .png or .svg.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Foretell the memory of every rank."""
    from axonlaunch.launch import forkserver

    if exact and formula:
        from axonlaunch.config import ConfigError, Problem

        raise ConfigError([Problem("", "--formula: --exact traces every layer; use one of both")])
    if plot is not None:
        from axonlaunch.engines.picture import check_plot

        check_plot(plot)
    with forkserver.warm() as context:
        from rich.console import Console

        from axonlaunch.launch.estimate import estimate

        with telling("tracing a step"):
            found = estimate(
                context,
                overrides or [],
                config_name=config_name,
                config_dirs=config_dir or [],
                exact=exact,
                formula=formula,
            )
    if plot is not None:
        from axonlaunch.planning.memory_plot import plot as draw

        draw(found, plot)
    if as_json:
        print_json(as_object(found))
        return
    console = Console(file=sys.stdout, highlight=False)
    show(found, console)
    if plot is not None:
        console.print(f"picture       {plot}", markup=False, soft_wrap=True)


def as_object(found: Forecast) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        **asdict(found.estimate),
        "changes": [asdict(remedy) for remedy in found.remedies],
        "notes": found.notes,
    }


def show(found: Forecast, console: Console) -> None:
    """Print a forecast: a table, bars, and whether it fits."""
    from rich.text import Text

    from axonlaunch.launch.console import quantity
    from axonlaunch.planning import report

    told = found.estimate
    ranks = "1 rank" if told.world_size == 1 else f"{told.world_size} ranks"
    console.print(f"[bold]{found.layout}[/bold]: {ranks}, {quantity(told.parameters)} parameters\n")
    for note in found.notes:
        console.print(Text.assemble(("note ", "yellow"), note, "\n"), soft_wrap=True)
    console.print(report.table(told))
    console.print()
    width = console.width
    console.print(report.bars(told, memory_bytes=found.memory_bytes, width=width), no_wrap=True)
    console.print()
    console.print(f"highest peak  {report.size(told.peak_bytes)} a rank")
    if told.process_bytes > told.peak_bytes:
        console.print(
            f"on a GPU      {report.size(told.reserved_bytes)} reserved by torch's allocator, "
            f"{report.size(told.process_bytes)} by the process"
        )
    if found.memory_bytes is not None:
        room = found.memory_bytes - told.process_bytes
        device = f"{found.hardware}, {report.size(found.memory_bytes)}"
        if told.fits is None:
            console.print(f"may fit       {device}: {report.size(room)} are left for the rest")
        elif told.fits:
            console.print(f"[green]fits[/green]          {device}: {report.size(room)} to spare")
        else:
            console.print(f"[red]does not fit[/red]  {device}: {report.size(-room)} too little")
            if not found.remedies and not found.notes:
                console.print("none of the changes that were tried makes it fit; use more ranks")
    for remedy in found.remedies:
        console.print()
        console.print(Text(" ".join(remedy.overrides), style="bold"), soft_wrap=True)
        for line in (f"{report.size(remedy.process_bytes)} a rank", *remedy.costs):
            console.print(textwrap.indent(textwrap.fill(line, width - 2), "  "), markup=False)
