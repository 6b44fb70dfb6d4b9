"""``axonlaunch runs``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axonlaunch.cli.options import Json, print_json, refuse
from axonlaunch.system.terminal import console_on

if TYPE_CHECKING:
    from axonlaunch.diagnostics.report.run_record import RunRecord

HELP = "List runs: status, layout, step, loss, speed, age."
EXAMPLES = """Examples:

\b
  axonlaunch runs
  axonlaunch runs /shared/runs --where model.name=llama --where status=failed
  axonlaunch runs --json
"""
_COLOURS = {"running": "cyan", "done": "green", "interrupted": "yellow"}


@dataclass(frozen=True)
class _Condition:
    key: str
    value: str

    def holds(self, run: RunRecord) -> bool:
        """Whether a run has this status, or this setting."""
        from axonlaunch.config.errors import plain

        return plain(run.status if self.key == "status" else run.config.get(self.key)) == self.value


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the runs are, at any depth.")
    ] = Path("runs"),
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Only runs with this configuration value or status; repeatable, all must match.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first."""
    from axonlaunch.diagnostics.report.run_record import find_runs

    conditions = [_condition(text) for text in where or []]
    if not folder.is_dir():
        refuse(f"{folder}: there is no such folder")
    runs = [
        run for run in find_runs(folder) if all(condition.holds(run) for condition in conditions)
    ]
    rows = sorted((_row(run) for run in runs), key=lambda row: -row["changed_at"])
    if as_json:
        print_json({"runs": rows})
    elif rows:
        _show(rows, folder)
    else:
        typer.echo(f"{folder} holds no run" + (" of this kind" if conditions else ""))


def _condition(text: str) -> _Condition:
    key, equals, value = text.partition("=")
    if not equals or not key:
        refuse(f"--where {text}: write KEY=VALUE, model.name=llama or status=failed")
    return _Condition(key, value)


def _row(run: RunRecord) -> dict[str, Any]:
    from axonlaunch.diagnostics.report.life import cost

    last = run.steps[-1] if run.steps else {}
    evaluated = run.evaluations[-1] if run.evaluations else {}
    files = [run.path / name for name in ("metrics.jsonl", "events.jsonl", "config.yaml")]
    return {
        "run": str(run.path),
        "status": run.status,
        "layout": run.started.get("layout"),
        "step": last.get("step", 0),
        "steps": run.config.get("train.steps"),
        "loss": last.get("loss"),
        "eval_loss": evaluated.get("eval_loss"),
        "tokens_per_s": last.get("tokens_per_s"),
        "cost": cost(run),
        "changed_at": max((file.stat().st_mtime for file in files if file.exists()), default=0.0),
    }


def _show(rows: list[dict[str, Any]], folder: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    from axonlaunch.system.formatting import ago, quantity

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "status", "layout", "step", "loss", "tokens/s", "age"):
        is_text = name in ("run", "status", "layout", "age")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        loss = row["loss"] if isinstance(row["loss"], float) else None
        speed = row["tokens_per_s"]
        table.add_row(
            Text(str(Path(row["run"]).relative_to(folder))),
            Text(row["status"], style=_COLOURS.get(row["status"], "red")),
            Text(str(row["layout"] or "")),
            f"{row['step']}/{row['steps']}",
            "" if loss is None else f"{loss:.4f}",
            quantity(speed) if isinstance(speed, int | float) else "",
            ago(time.time() - row["changed_at"]),
        )
    console_on().print(table)
