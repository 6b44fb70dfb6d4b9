"""``axonlaunch runs``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from axonlaunch.cli.shared.options import Json, print_json, refuse
from axonlaunch.system.storage.files import modified_at, why_no_folder
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

    from axonlaunch.diagnostics.report.record.run_record import RunRecord

HELP = "List runs: status, layout, step, loss, speed, age."
EXAMPLES = """Examples:

\b
  axonlaunch runs
  axonlaunch runs /shared/runs --where model.name=llama --where status=failed
  axonlaunch runs --json
"""
_COLORS = {"running": "cyan", "done": "green", "interrupted": "yellow"}
_COLUMNS = ("run", "status", "layout", "step", "loss", "speed", "age")
_NARROW = ("run", "status", "step", "loss")
"""Columns in a terminal of less than 64 columns."""


@dataclass(frozen=True)
class _Condition:
    key: str
    value: str

    def holds(self, run: RunRecord) -> bool:
        """Return whether a run has this status or setting. Numbers are compared as numbers."""
        from axonlaunch.config.problems.errors import plain

        if self.key == "status":
            return run.status == self.value
        value = run.config.get(self.key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(ValueError):
                return float(self.value) == value
        return plain(value) == self.value


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that contains the runs, at any depth.")
    ] = Path("runs"),
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="KEY=VALUE",
            help="Only runs with this setting or status; if repeated, all must match.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from axonlaunch.diagnostics.report.record.run_record import find_runs

    conditions = [_condition(text) for text in filters or []]
    if not folder.is_dir():
        refuse(f"{folder}: {why_no_folder(folder)}")
    runs, keys = [], set[str]()
    for run in find_runs(folder):
        keys.update(run.config)
        if all(condition.holds(run) for condition in conditions):
            runs.append(run)
    _check_conditions(conditions, keys, folder)
    rows = sorted((row_of(run) for run in runs), key=lambda row: -row["changed_at"])
    if as_json:
        print_json({"runs": rows})
    elif rows:
        _show(rows, folder)
    else:
        typer.echo(f"{folder}: no run" + (" matches --where" if conditions else ""))


def _condition(text: str) -> _Condition:
    key, equals, value = text.partition("=")
    if not equals or not key:
        refuse("write KEY=VALUE, for example status=failed", option="--where", value=text)
    return _Condition(key, value)


def _check_conditions(conditions: list[_Condition], keys: set[str], folder: Path) -> None:
    """Check that conditions name a known status or a key that some run has.

    Raises:
        ConfigError: A status or key is unknown.
    """
    from axonlaunch.config.problems.did_you_mean import nearest, unknown
    from axonlaunch.diagnostics.report.record.run_record import RunStatus

    for condition in conditions:
        if condition.key == "status":
            if condition.value not in get_args(RunStatus):
                message = unknown("status", condition.value, get_args(RunStatus))
                refuse(message, option="--where", value=f"status={condition.value}")
        elif keys and condition.key not in keys:
            ends = [key for key in sorted(keys) if key.endswith(f".{condition.key}")]
            close = ends[0] if ends else nearest(condition.key, sorted(keys))
            reason = f"no run in {folder} has this key"
            reason += f"; did you mean {close}?" if close else ""
            wrong = f"{condition.key}={condition.value}"
            refuse(reason, option="--where", value=wrong)


def row_of(run: RunRecord) -> dict[str, Any]:
    """Return what ``axonlaunch runs`` shows of a run."""
    from axonlaunch.config import CONFIG
    from axonlaunch.diagnostics.report.record.run_timeline import cost
    from axonlaunch.system.storage.run_files import EVENTS, METRICS
    from axonlaunch.system.text.units import rate_in

    last = run.steps[-1] if run.steps else {}
    evaluated = run.evaluations[-1] if run.evaluations else {}
    files = [run.path / name for name in (METRICS, EVENTS, CONFIG)]
    return {
        "run": str(run.path),
        "status": run.status,
        "layout": run.started.get("layout"),
        "step": last.get("step", 0),
        "steps": run.config.get("train.steps"),
        "loss": last.get("loss"),
        "eval_loss": evaluated.get("eval_loss"),
        "metrics": {key: evaluated.get(key) for key in run.metrics},
        "counted": run.unit,
        f"{run.unit}_per_s": rate_in(last)[1],
        "cost": cost(run),
        "changed_at": max(modified_at(file) for file in files),
        "notes": run.notes,
    }


def _show(rows: list[dict[str, Any]], folder: Path) -> None:
    from rich.text import Text

    console = console_on()
    console.print(table_of(rows, folder, width=console.width))
    for row in rows:
        for note in row["notes"]:
            console.print(Text(f"{Path(row['run']).relative_to(folder)}: {note}", style="yellow"))


def table_of(rows: Sequence[dict[str, Any]], folder: Path, *, width: int) -> Table:
    """Return the table of runs.

    Args:
        rows: Results of ``row_of``.
        folder: Folder that contains the runs.
        width: Columns of the terminal.
    """
    from rich.table import Table
    from rich.text import Text

    from axonlaunch.system.text.formatting import ago, quantity

    table = Table(box=None, padding=(0, 2, 0, 0))
    names = _COLUMNS if width >= 64 else _NARROW
    for name in names:
        is_text = name in ("run", "status", "layout", "age")
        table.add_column(
            name,
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=name in ("status", "step", "loss", "age"),
        )
    for row in rows:
        loss = row["loss"] if isinstance(row["loss"], float) else None
        unit = row["counted"]
        speed = row[f"{unit}_per_s"]
        cells: dict[str, Any] = {
            "run": BreakableName(str(Path(row["run"]).relative_to(folder))),
            "status": Text(row["status"], style=_COLORS.get(row["status"], "red")),
            "layout": Text(str(row["layout"] or "")),
            "step": "" if row["status"] == "unreadable" else f"{row['step']}/{row['steps']}",
            "loss": "" if loss is None else f"{loss:.4f}",
            "speed": f"{quantity(speed)} {unit}/s" if isinstance(speed, int | float) else "",
            "age": ago(time.time() - row["changed_at"]),
        }
        table.add_row(*(cells[name] for name in names))
    return table


@dataclass(frozen=True)
class BreakableName:
    """A name that a narrow column breaks after ``-``, ``_``, ``.`` and ``/``, not in words."""

    text: str

    def lines(self, width: int) -> list[str]:
        """Return the name in lines of at most this width; longer words are cut."""
        lines = [""]
        for word in re.split(r"(?<=[-_./])", self.text):
            if lines[-1] and len(lines[-1] + word) > width:
                lines.append("")
            lines[-1] += word
        return [part for line in lines for part in re.findall(f".{{1,{max(1, width)}}}", line)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text("\n".join(self.lines(options.max_width)), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        longest = max(map(len, re.split(r"(?<=[-_./])", self.text)))
        return Measurement(min(longest, options.max_width), min(len(self.text), options.max_width))
