"""``axonlaunch watch``."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import refuse
from axonlaunch.system.storage.files import modified_at
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rich.console import Console

HELP = "Show a run while it trains, in a browser or in the terminal."
EXAMPLES = """Examples:

\b
  axonlaunch watch                       # the newest run in ./runs
  axonlaunch watch runs/gpt-fsdp --open
  axonlaunch watch --tui
  axonlaunch watch big                   # waits until runs/big has started
  axonlaunch watch runs/sweep            # the table of many runs
"""
_WAIT_S = 0.2
"""Seconds between two looks for a run that has not started."""
_REST = 20.0
"""Seconds between two tables per second of work; limits the load to a twentieth of a core."""


def command(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="Folder or name of the run, which may start later, or a folder of runs, whose "
            "table is shown; default: the newest run in ./runs.",
            show_default=False,
        ),
    ] = None,
    tui: Annotated[bool, typer.Option("--tui", help="Show the run in this terminal.")] = False,
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="Port on 127.0.0.1; 0 uses a free port."
        ),
    ] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page of the run until Ctrl-C, also after the run ends or restarts."""
    from axonlaunch.cli.shared.run_folders import has_runs, read_runs
    from axonlaunch.diagnostics.report.live_page_data import LivePageData

    path = _newest(Path("runs")) if run is None else await_run(run)
    if has_runs(path):
        _follow_table(path)
        return
    [record] = read_runs([str(path)])
    data = LivePageData([record.path])
    if tui:
        _follow_in_terminal(data)
        return
    from axonlaunch.diagnostics.report.server import RunServer

    try:
        server = RunServer(data, title=record.name, port=port)
    except OSError as error:
        reason = f"can't listen on this port ({error.strerror})"
        refuse(f"{reason}; use another, or 0 for a free one", option="--port", value=port)
    typer.echo(f"{record.path}: {server.url}  (Ctrl-C to stop)")
    if show:
        import webbrowser

        webbrowser.open(server.url)
    server.serve()


def _newest(folder: Path) -> Path:
    from axonlaunch.config import CONFIG
    from axonlaunch.diagnostics.report.record.run_record import find_runs

    runs = list(find_runs(folder))
    readable = [run.path for run in runs if run.status != "unreadable"]
    if not readable:
        reason = "contains no readable run" if runs else "contains no run"
        refuse(f"{folder}: {reason}; give the folder of a run")
    return max(readable, key=lambda path: modified_at(path / CONFIG))


def await_run(path: Path) -> Path:
    """Return the folder of a run or of runs with this path or name; wait for a missing one."""
    from axonlaunch.cli.shared.run_folders import has_runs
    from axonlaunch.diagnostics.report.record.run_record import NotARunError, read_run

    folders = [path] if path.is_absolute() else [path, Path("runs", path)]
    if any(folder.exists() for folder in folders):
        return next(folder for folder in folders if folder.exists())
    typer.echo(f"waiting for a run in {path} to start (Ctrl-C to stop)", err=True)
    while True:
        for folder in folders:
            if has_runs(folder):
                return folder
            with suppress(NotARunError):
                read_run(folder)
                return folder
        time.sleep(_WAIT_S)


def _terminal(instead: str) -> Console:
    """Return a console on standard output.

    Args:
        instead: Advice without a terminal, where rich prints a live view only at its end.

    Raises:
        ConfigError: Standard output is not a terminal.
    """
    console = console_on()
    if not console.is_terminal:
        refuse(f"this view changes in place and needs a terminal; {instead}")
    return console


def _follow_table(folder: Path) -> None:
    """Show the table of the runs in a folder, newest first, until Ctrl-C."""
    from rich.live import Live

    from axonlaunch.cli.reports.runs import row_of, table_of
    from axonlaunch.diagnostics.report.record.run_record import find_runs

    def table() -> Any:
        rows = sorted(map(row_of, find_runs(folder)), key=lambda row: -row["changed_at"])
        return table_of(rows, folder, width=console.width)

    console = _terminal(f"use axonlaunch runs {folder}")
    with Live(table(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            began = time.thread_time()
            live.update(table(), refresh=True)
            time.sleep(max(1.0, _REST * (time.thread_time() - began)))


def _follow_in_terminal(data: Callable[[], dict[str, Any]]) -> None:
    from rich.live import Live

    from axonlaunch.cli.shared.run_screen import screen_of

    console = _terminal("use axonlaunch watch without --tui, or axonlaunch report")
    with Live(screen_of(data()["runs"][0], console.size), console=console, screen=True) as live:
        while True:
            time.sleep(1.0)
            live.update(screen_of(data()["runs"][0], console.size))
