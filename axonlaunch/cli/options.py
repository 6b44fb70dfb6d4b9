"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from axonlaunch.config import ConfigIssue

STARTED = time.time()
"""When this command began, near enough: the interpreter has only imported Typer so far."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Hydra overrides (group=option, key=value)."),
]
ConfigDir = Annotated[
    list[Path] | None,
    typer.Option(
        "--config-dir",
        help="Folder of your own YAML, searched before the packaged one.",
        show_default=False,
    ),
]
ConfigName = Annotated[str, typer.Option("--config-name", help="Primary config.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the code that the run's configuration names; use it only for code you trust.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def show_help(context: typer.Context) -> None:
    """Show what a command with commands of its own has, where none of them is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def refuse(message: str) -> NoReturn:
    """End the command with one error that is of no key.

    Raises:
        ConfigError: Always.
    """
    from axonlaunch.config import ConfigError, ConfigIssue

    raise ConfigError([ConfigIssue("", message)])


def print_json(content: dict[str, Any]) -> None:
    """Print one object on standard output."""
    from axonlaunch.config.environment_values import without_environment

    sys.stdout.write(json.dumps(without_environment(content), indent=1) + "\n")


def print_problems(problems: Sequence[ConfigIssue], *, as_json: bool) -> None:
    """Print what is wrong, a line each on standard error, and for programs on standard output."""
    for problem in problems:
        sys.stderr.write(f"error: {_printable(str(problem))}\n")
    if as_json:
        print_json({"errors": problems_to_json(problems)})


def problems_to_json(problems: Sequence[ConfigIssue]) -> list[dict[str, Any]]:
    """Return problems as ``--json`` prints them."""
    return [{"key": problem.key or None, "message": problem.message} for problem in problems]


def _printable(text: str) -> str:
    """Write what would move a terminal's cursor or set its title as Python would."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
