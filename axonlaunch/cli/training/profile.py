"""``axonlaunch profile``."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.shared.options import Json, Trust, print_json
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from axonlaunch.config import RunConfig
    from axonlaunch.diagnostics.step_breakdown import Breakdown

HELP = "Show how a run's profiled steps spent their time."
EXAMPLES = """Examples:

\b
  axonlaunch train strategy=fsdp 'train.profile.steps=[10,13]' name=profiled
  axonlaunch profile runs/profiled
"""
_SHOWN = 8
"""Number of ranks with a column; --json lists all."""


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run with train.profile.steps.")
    ],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Show how a run's profiled steps spent their time."""
    from axonlaunch import config as configuration
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.config.consistency.layout import Layout, num_ranks
    from axonlaunch.diagnostics import step_breakdown

    config = configuration.read_frozen(folder, trusted=trust)
    paths = step_breakdown.traces(folder)
    if not paths:
        message = f"{folder}: no step was profiled; train with train.profile.steps=[FIRST,LAST]"
        raise ConfigError([ConfigIssue("", message)])
    axes = Layout.of(config, world_size=num_ranks(config)).axes
    several = [axis for axis, size in axes.items() if size > 1]
    world = several[0] if len(several) == 1 else "world"
    try:
        breakdowns = [
            step_breakdown.breakdown(step_breakdown.read_trace(path), rank=rank, world=world)
            for rank, path in paths.items()
        ]
    except step_breakdown.UnreadableTraceError as error:
        raise ConfigError([ConfigIssue("", str(error))]) from error
    predicted, reason = _predict_parts(config)
    if as_json:
        print_json(
            {
                "ranks": [asdict(breakdown) for breakdown in breakdowns],
                "predicted": predicted,
                "not_predicted": reason or None,
                "merged": str(folder / step_breakdown.PROFILE_FOLDER / step_breakdown.MERGED),
            }
        )
        return
    _show(folder, breakdowns, predicted, reason)


def _predict_parts(config: RunConfig) -> tuple[dict[str, float] | None, str]:
    """Return the seconds that ``plan`` predicts for each part of a step, or None and the reason."""
    from axonlaunch.config import ConfigError
    from axonlaunch.planning.records import StepPrediction
    from axonlaunch.planning.throughput.run_hardware import hardware_of_run
    from axonlaunch.system.processes import forked_call, forkserver
    from axonlaunch.system.text.spinner import spinner

    hardware, reason = hardware_of_run(config)
    if hardware is None:
        return None, reason
    config = dataclasses.replace(config, hardware=hardware)
    try:
        with forkserver.warm() as context, spinner("predicting a step"):
            step: StepPrediction = forked_call.call(
                context,
                "axonlaunch.planning.throughput.predicted_parts:predict_step",
                config,
                task="predicting a step's time",
            )
    except ConfigError as error:
        return None, str(error)
    return step.parts, ""


def _show(
    folder: Path, breakdowns: list[Breakdown], predicted: dict[str, float] | None, reason: str
) -> None:
    from rich.table import Table

    from axonlaunch.diagnostics import step_breakdown

    console = console_on()
    first, shown = breakdowns[0], breakdowns[:_SHOWN]
    steps = f"step {first.first}" if first.steps == 1 else f"{first.steps} steps from {first.first}"
    console.print(f"[bold]{folder.name}[/bold]: {steps}, mean per step\n", soft_wrap=True)
    columns: list[tuple[str, dict[str, float]]] = [(f"rank {o.rank}", o.parts) for o in shown]
    if predicted is not None:
        columns.append(("predicted", predicted))
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for kind in _kinds([seconds for _, seconds in columns]):
        table.add_row(kind, *(_cell(seconds.get(kind, 0.0), seconds) for _, seconds in columns))
    table.add_row("step", *(f"{sum(seconds.values()) * 1e3:,.1f} ms" for _, seconds in columns))
    console.print(table)
    if len(breakdowns) > _SHOWN:
        console.print(f"\n{len(breakdowns) - _SHOWN} more ranks; use --json to list all")
    if reason:
        console.print(f"\nNo prediction: {reason}", markup=False)
    merged = folder / step_breakdown.PROFILE_FOLDER / step_breakdown.MERGED
    console.print(f"\nTo see the trace, open {merged} at https://ui.perfetto.dev", soft_wrap=True)


def _kinds(columns: list[dict[str, float]]) -> list[str]:
    """Return the kinds of all columns in the order of ``KINDS``, communication sorted by axis."""
    from axonlaunch.diagnostics.step_breakdown import KINDS

    def sort_key(kind: str) -> tuple[int, str]:
        return next((n for n, prefix in enumerate(KINDS) if kind.startswith(prefix)), 0), kind

    return sorted({kind for column in columns for kind in column}, key=sort_key)


def _cell(seconds: float, column: dict[str, Any]) -> str:
    total = sum(column.values())
    return f"{seconds * 1e3:,.1f} ms {seconds / total if total else 0:4.0%}"
