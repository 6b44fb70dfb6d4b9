"""Arguments, options and output functions that several commands share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from axonlaunch.config import ConfigIssue

STARTED = time.time()
"""Approximate start of this command, in seconds since 1970; only Typer was imported before."""

MAX_TOKENS = 1e18
"""Largest number of ``--tokens``; all text that exists is far less."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE...",
        help="Settings of the configuration: group=option or key=value, and a FILE.yaml of them.",
    ),
]
ConfigDir = Annotated[
    list[Path] | None,
    typer.Option(
        "--config-dir",
        metavar="FOLDER",
        help="Folder with your configuration files, searched before the packaged ones; repeatable.",
        show_default=False,
    ),
]
ConfigName = Annotated[
    str,
    typer.Option(
        "--config-name",
        "--config",
        metavar="FILE",
        help="Primary configuration: a FILE.yaml, or a name in --config-dir without .yaml.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the Python code that the run's configuration names. Only for code you trust.",
    ),
]
TokenCount = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="N",
        help="Number of tokens to train on, as in 3T: predict days, goodput, price and energy.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def words_of(*words: str) -> Callable[[], list[str]]:
    """Return a function with the values of an option, for ``typer.Option(autocompletion=...)``."""

    def values() -> list[str]:
        return [*words]

    return values


def show_help(context: typer.Context) -> None:
    """Print the help text of a command that was called without a subcommand."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def refuse(message: str, *, option: str = "", value: Any = ...) -> NoReturn:
    """End the command with an error that belongs to no configuration key.

    Args:
        message: Description of the error, and what to write instead.
        option: Name of the option or argument; empty without one.
        value: Value of the option.

    Raises:
        ConfigError: Always.
    """
    from axonlaunch.config import ConfigError, ConfigIssue

    raise ConfigError([ConfigIssue(option, message, value)])


def check_tokens(tokens: str | None) -> float | None:
    """Return the number of ``--tokens``; None without the option.

    Raises:
        ConfigError: ``--tokens`` is not a number from 1 to ``MAX_TOKENS``.
    """
    if tokens is None:
        return None
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.system.text.formatting import parse_quantity

    number = parse_quantity(tokens)
    if number is None or not 1 <= number <= MAX_TOKENS:
        message = f"must be a number of tokens from 1 to {MAX_TOKENS:g}, as in 3T, 500B or 1e9"
        raise ConfigError([ConfigIssue("--tokens", message, tokens)])
    return number


def print_json(content: dict[str, Any]) -> None:
    """Print an object as JSON to standard output.

    Texts with the value of an environment variable show ``${oc.env:NAME}`` instead of the value.
    """
    from axonlaunch.config.values.environment_values import without_environment

    sys.stdout.write(json.dumps(without_environment(content), indent=1) + "\n")


def print_problems(problems: Sequence[ConfigIssue], *, as_json: bool) -> None:
    """Print each problem as a line on standard error, and as JSON on standard output if asked."""
    for problem in problems:
        sys.stderr.write(f"error: {escape_unprintable(str(problem))}\n")
    if as_json:
        print_json({"errors": problems_to_json(problems)})


def problems_to_json(problems: Sequence[ConfigIssue]) -> list[dict[str, Any]]:
    """Return problems in the form that ``--json`` prints."""
    return [{"key": problem.key or None, "message": problem.message} for problem in problems]


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters, which could move the cursor or change the terminal's title."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
