"""``axonlaunch ls``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import typer

from axonlaunch.cli.shared.options import ConfigDir, Json, print_json, words_of
from axonlaunch.system.text.terminal import console_on

Value = TypeVar("Value")

HELP = "List the options of a group. ls hf lists proved Hugging Face layouts."
EXAMPLES = """Examples:

\b
  axonlaunch ls
  axonlaunch ls strategy
  axonlaunch ls models --json
  axonlaunch ls hf --like llama
  axonlaunch ls models --plugin my_models
"""
HF = "hf"
_LONGEST_WORD = 6
"""Letters of a header's word in ``ls hf``, so that the table fits into 80 columns."""
SHOWS_REASONS = 12
"""Reasons why layouts are not proved are printed for at most this many models."""
LISTS = {
    "models": "model",
    "adapters": "adapter",
    "data": "data",
    "tokenizers": "tokenizer",
    "strategies": "strategy",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "launchers": "launch",
    "metrics": "metrics",
    "callbacks": "callbacks",
    "loggers": "loggers",
    "losses": "train.loss",
    "data_parallel": "strategy.data_parallel",
    "dispatches": "strategy.expert.dispatch",
    "hardware": "hardware",
    "experiments": "experiment",
}
"""Names of lists and their configuration groups."""
ALIASES = {group: name for name, group in LISTS.items()} | {
    "dataset": "data",
    "datasets": "data",
    "launcher": "launchers",
    "launches": "launchers",
    "logger": "loggers",
    "metric": "metrics",
    "callback": "callbacks",
    "loss": "losses",
    "schedules": "schedulers",
}
"""Other names of lists: the group's name in overrides, plurals and singulars."""


def command(
    group: Annotated[
        str | None,
        typer.Argument(
            metavar="GROUP",
            help=f"One of {', '.join(LISTS.values())}, or its plural. hf lists which "
            "layouts are proved for each model_type of transformers. Default: all groups.",
            autocompletion=words_of(*LISTS, HF),
        ),
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only names that contain this text.")
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Import this Python module and list what it registers; repeatable.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """List the options of configuration groups, or proved Hugging Face layouts."""
    from axonlaunch.config import ConfigError, ConfigIssue, composer_of
    from axonlaunch.config.code.plugins import import_plugins
    from axonlaunch.config.problems.did_you_mean import unknown

    if problems := import_plugins(plugin or []):
        raise ConfigError(problems)
    if group == HF:
        _list_proved(like, as_json=as_json)
        return
    chosen = list(LISTS) if group is None else [ALIASES.get(group, group)]
    if group is not None and chosen[0] not in LISTS:
        raise ConfigError([ConfigIssue("", unknown("group", group, [*LISTS.values(), HF]))])
    composer = composer_of(config_dir or [])
    listed = {name: _like(like, composer.options(LISTS[name])) for name in chosen}
    if as_json:
        print_json(listed)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, options in listed.items():
        if group is None:
            table.add_row(f"[cyan]{name}[/cyan]", f"[dim]{LISTS[name]}=...[/dim]")
        if not options:
            table.add_row("", "[dim]none registered[/dim]")
        for option, summary in options.items():
            table.add_row(option if group else f"  {option}", escape(summary))
    console_on().print(table)


def _like(like: str | None, options: Mapping[str, Value]) -> dict[str, Value]:
    """Return the options whose names contain ``like``, ignoring case."""
    part = (like or "").lower()
    return {name: value for name, value in options.items() if part in name.lower()}


def _list_proved(like: str | None, *, as_json: bool) -> None:
    """Print which layouts are proved for each model of transformers.

    Raises:
        ConfigError: No ``model_type`` contains ``like``.
    """
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.config.problems.did_you_mean import unknown
    from axonlaunch.verification.proofs.proved_layouts import proved_table

    table = proved_table()
    families = _like(like, table.families_by_type)
    if not families:
        raise ConfigError(
            [ConfigIssue("", unknown("model_type", str(like), table.families_by_type))]
        )
    if as_json:
        rows = {
            kind: {
                "class": family.class_name,
                "proved": [layout for layout in table.layouts if layout not in family.refused],
                "refused": dict(family.refused),
                "notes": dict(family.notes),
            }
            for kind, family in families.items()
        }
        print_json({"versions": table.versions, "layouts": table.layouts, "model_types": rows})
        return
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=None, padding=(0, 1, 0, 0))
    shown.add_column("model\ntype", style="bold", overflow="fold")
    for layout in table.layouts:
        words = map(_hyphenate, layout.replace(" x ", "x").split())
        shown.add_column("\n".join(words), no_wrap=True)
    for kind, family in families.items():
        shown.add_row(
            kind, *("no" if layout in family.refused else "yes" for layout in table.layouts)
        )
    if len(families) > SHOWS_REASONS:
        counts = (
            str(sum(layout not in family.refused for family in families.values()))
            for layout in table.layouts
        )
        shown.add_section()
        shown.add_row(f"yes (of {len(families)})", *counts)
    console = console_on()
    console.print(shown)
    if len(families) <= SHOWS_REASONS:
        for kind, family in families.items():
            layouts: dict[str, list[str]] = {}
            for layout, reason in {**family.notes, **family.refused}.items():
                layouts.setdefault(reason, []).append(layout)
            for reason, affected in layouts.items():
                is_all = len(affected) == len(table.layouts)
                names = "all layouts" if is_all else ", ".join(affected)
                console.print(escape(f"{kind}, {names}: {reason}"))
    versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    console.print(f"\nproved with {versions}; see axonlaunch help huggingface")


def _hyphenate(word: str) -> str:
    middle = len(word) // 2
    return word if len(word) <= _LONGEST_WORD else f"{word[:middle]}-\n{word[middle:]}"
