"""Formats ``--help``: commands in groups, and the arguments of a command by their names only.

An unknown command is refused with the one that was probably meant.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Subcommands(TyperGroup):
    """A command with subcommands that refuses an unknown one with a suggestion."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the remaining arguments of a command line.

        Raises:
            ConfigError: There is no such command.
        """
        name, is_completion = args[0], ctx.resilient_parsing
        if name not in self.commands and not name.startswith("-") and not is_completion:
            from axonlaunch.cli.shared.usage_errors import unknown_command
            from axonlaunch.config import ConfigError

            program = "axonlaunch" if ctx.parent is None else f"axonlaunch {self.name}"
            raise ConfigError([unknown_command(name, self.commands, program=program)])
        return super().resolve_command(ctx, args)


class CommandGroups(Subcommands):
    """An application whose commands are listed by their help panels, in the order of addition."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a table of commands for each panel."""
        del ctx
        width = max(len(name) for name in self.commands)
        limit = formatter.width - 6 - width
        panels: dict[str, list[tuple[str, str]]] = {}
        command: Any  # click's type lacks Typer's attribute
        for name, command in self.commands.items():
            row = (f"{name:<{width}}", command.get_short_help_str(limit))
            panels.setdefault(command.rich_help_panel, []).append(row)
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Command(TyperCommand):
    """A command whose arguments are shown as ``RUN...`` and not as ``{RUN...}... <list[str]>``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line after the command's name."""
        del ctx
        arguments = [
            name if parameter.required else f"[{name}]" for parameter, name in self._arguments()
        ]
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the tables of arguments and options."""
        records = {
            parameter: record
            for parameter in self.get_params(ctx)
            if (record := parameter.get_help_record(ctx)) is not None
        }
        names = dict(self._arguments())
        arguments = [(names[p], text) for p, (_, text) in records.items() if p in names]
        options = [record for p, record in records.items() if p not in names]
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _arguments(self) -> list[tuple[Any, str]]:
        """Return each positional argument and its name in the help text."""
        return [
            (parameter, str(parameter.metavar or parameter.name).upper())
            for parameter in self.params
            if parameter.param_type_name == "argument"
        ]
