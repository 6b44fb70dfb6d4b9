"""``axonlaunch ls``."""

from __future__ import annotations

from typing import Annotated

import typer

from axonlaunch.cli.options import ConfigDir, Json, print_json

HELP = "List the options of each configuration group."
EXAMPLES = """Examples:

\b
  axonlaunch ls
  axonlaunch ls strategy
  axonlaunch ls models --json
"""
LISTS = {
    "models": "model",
    "data": "data",
    "tokenizers": "tokenizer",
    "strategies": "strategy",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "launchers": "launch",
    "loggers": "loggers",
    "data_parallel": "strategy.data_parallel",
    "hardware": "hardware",
    "experiments": "experiment",
}
"""Each list, to the group that it lists."""
ALIASES = {group: name for name, group in LISTS.items()} | {
    "datasets": "data",
    "launches": "launchers",
    "logger": "loggers",
    "schedules": "schedulers",
}
"""Other names of a list: its group as overrides write it, and other plurals."""


def command(
    group: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join(LISTS.values())}, or a plural; default: all."),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """List the options of each configuration group."""
    from axonlaunch.config import ConfigError, ConfigIssue, composer_of
    from axonlaunch.registry import unknown

    chosen = list(LISTS) if group is None else [ALIASES.get(group, group)]
    if group is not None and chosen[0] not in LISTS:
        raise ConfigError([ConfigIssue("", unknown("group", group, LISTS.values()))])
    composer = composer_of(config_dir or [])
    listed = {name: composer.options(LISTS[name]) for name in chosen}
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
        if group is None:
            table.add_row(f"[cyan]{name}[/cyan]", f"[dim]{LISTS[name]}=...[/dim]")
        for option, summary in options.items():
            table.add_row(option if group else f"  {option}", escape(summary))
    Console(highlight=False).print(table)
