"""``axonlaunch ls``."""

from __future__ import annotations

from typing import Annotated

import typer

from axonlaunch.cli.options import ConfigDir, Json, print_json

HELP = "List what a configuration can choose from."
EXAMPLES = """Examples:

\b
  axonlaunch ls
  axonlaunch ls strategies
  axonlaunch ls models --json
"""
KINDS = {
    "models": "model",
    "data": "data",
    "strategies": "strategy",
    "optimizers": "optimizer",
    "schedules": "scheduler",
    "launchers": "launch",
    "hardware": "hardware",
    "experiments": "experiment",
}


def command(
    kind: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(KINDS)}; all without it.")
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """List what a configuration can choose from."""
    from axonlaunch.config import Composer, ConfigError, ConfigIssue
    from axonlaunch.registry import unknown

    if kind is not None and kind not in KINDS:
        raise ConfigError([ConfigIssue("", unknown("list", kind, KINDS))])
    composer = Composer(config_dirs=config_dir or [])
    chosen = [kind] if kind else list(KINDS)
    listed = {name: composer.options(KINDS[name]) for name in chosen}
    if as_json:
        print_json(listed)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, options in listed.items():
        if kind is None:
            table.add_row(f"[cyan]{name}[/cyan]", f"[dim]{KINDS[name]}=...[/dim]")
        for option, summary in options.items():
            table.add_row(option if kind else f"  {option}", escape(summary))
    Console(highlight=False).print(table)
