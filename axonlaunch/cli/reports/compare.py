"""``axonlaunch compare``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from axonlaunch.cli.shared.options import Json, print_json, refuse
from axonlaunch.cli.shared.run_folders import read_runs
from axonlaunch.system.text.terminal import console_on

HELP = "Compare the configurations and results of runs."
EXAMPLES = """Examples:

\b
  axonlaunch compare runs/gpt-ddp runs/gpt-fsdp
  axonlaunch compare runs/sweep --json
"""


def command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...", help="Folders of two or more runs, or a folder of runs."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print settings and results that differ, with a column for each run."""
    from axonlaunch.diagnostics.report.comparison import changed_settings, results, with_units
    from axonlaunch.diagnostics.report.page_data import labels

    records = read_runs(runs)
    if len(records) < 2:
        refuse("give two or more runs, or a folder of runs", option="RUN")
    settings, outcomes, names = changed_settings(records), results(records), labels(records)
    if as_json:
        print_json({"runs": names, "configuration": dict(settings), "results": dict(outcomes)})
        return
    from rich.table import Table
    from rich.text import Text

    console = console_on()
    for title, rows in (("configuration", settings), ("results", with_units(outcomes))):
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column(title, overflow="fold")
        for name in names:
            table.add_column(Text(name), justify="right", overflow="fold")
        for key, values in rows:
            table.add_row(key, *(Text(_short(value)) for value in values))
        console.print(table if rows else f"{title}: no differences")
        console.print()


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
