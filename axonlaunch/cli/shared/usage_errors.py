"""Converts errors in the use of a command to problems with a key, a value and what to write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from axonlaunch.config import ConfigIssue
from axonlaunch.config.problems.did_you_mean import nearest

_OTHER_COMMANDS = {
    "cancel": "stop",
    "chat": "sample RUN --chat",
    "export": "checkpoint export",
    "generate": "sample",
    "import": "checkpoint import",
    "launch": "train",
    "merge": "checkpoint export --merge",
    "run": "train",
    "submit": "train launch=slurm",
    "sweep": "train -m",
}
"""Maps names of commands that users look for to the command here."""
_CLOSE = 0.75
"""Least similarity of an unknown option to an option that is suggested for it."""


def unknown_command(name: str, commands: Iterable[str], *, program: str) -> ConfigIssue:
    """Return the problem of an unknown command, with the command that was probably meant.

    Args:
        name: Name that the user wrote.
        commands: Names of the commands.
        program: Words before the command: ``axonlaunch`` or ``axonlaunch checkpoint``.
    """
    names, group = [*commands], program.partition(" ")[2]
    other = _OTHER_COMMANDS.get(name, "").removeprefix(f"{group} ")
    meant = other if other.partition(" ")[0] in names else nearest(name, names)
    hint = f"did you mean {program} {meant}?" if meant else f"{program} --help lists commands"
    return ConfigIssue("", f"there is no command {name!r}; {hint}")


def usage_problem(error: Exception, arguments: Sequence[str]) -> ConfigIssue | None:
    """Return the problem of an error that Typer raised; None for any other error.

    Args:
        error: Exception of the application.
        arguments: Arguments of the command line, in which the invalid value is looked up.
    """
    # Usage errors have this method in all versions of Typer. Some raise click's classes, some
    # classes of their own.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    text = " ".join(format_message().split())
    if option := getattr(error, "option_name", None):
        possible = getattr(error, "possibilities", ...)
        if possible is ...:  # a value is missing, or an option takes none
            return ConfigIssue(option, text.removeprefix(f"Option {option!r} ").rstrip("."))
        close = nearest(option, possible or [], cutoff=_CLOSE)
        meant = f"did you mean {close}? " if close else ""
        message = f"{meant}see --help for options; settings are written key=value, without dashes"
        return ConfigIssue(option, f"there is no such option; {message}")
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ConfigIssue("", text)
    key = _name_of(parameter)
    if text.startswith("Missing "):
        meaning = getattr(parameter, "help", None) or "see --help"
        return ConfigIssue(key, f"is missing: {meaning[0].lower()}{meaning[1:].rstrip('.')}")
    message = str(getattr(error, "message", text)).removeprefix("Value error, ").rstrip(".")
    message = message.replace("Input should be", "must be", 1)
    return ConfigIssue(key, message, _value_of(parameter, arguments))


def _name_of(parameter: Any) -> str:
    """Return the longest name of an option, or the name of an argument in the help text."""
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.name.upper())


def _value_of(parameter: Any, arguments: Sequence[str]) -> Any:
    """Return the value of an option on the command line; ``...`` if it is not found."""
    for number, argument in enumerate(arguments):
        name, is_joined, value = argument.partition("=")
        if name in parameter.opts:
            return value if is_joined else next(iter(arguments[number + 1 :]), ...)
    return ...
