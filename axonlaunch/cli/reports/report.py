"""``axonlaunch report``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import Json, print_json
from axonlaunch.cli.shared.output_files import check_file, writing
from axonlaunch.cli.shared.run_folders import read_runs
from axonlaunch.system.text.spinner import spinner

if TYPE_CHECKING:
    from axonlaunch.diagnostics.report.record.run_record import RunRecord

HELP = "Write an HTML page of runs. Several runs are compared."
EXAMPLES = """Examples:

\b
  axonlaunch report runs/gpt-fsdp
  axonlaunch report runs/gpt-fsdp runs/gpt-ddp --output both.html --open
  axonlaunch report runs/sweep           # all runs in the folder
"""
_PAGE = "report.html"
_LONGEST = 80
"""Maximum length of the run names in the page's file name."""


def command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Folders or fsspec URLs of runs, or a folder of runs."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to write. Default: report.html in the run's folder; for several runs, "
            "report-A-B.html beside the first run.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write a page with curves, memory, ranks, timeline and failure; it needs no server.

    The runs may still be training, or may have crashed.
    """
    from axonlaunch.diagnostics.report.page import page_of
    from axonlaunch.diagnostics.report.page_data import labels, page_data
    from axonlaunch.system.storage.files import replace_text

    if output is not None:
        check_file("--output", output)
    with spinner("reading"):
        records = read_runs(runs)
        page = page_of(page_data(records), title=", ".join(labels(records)))
    if output is None:
        output = _default_output(records, runs)
    with writing("--output", output):
        replace_text(output, page)
    if as_json:
        print_json({"page": str(output), "bytes": len(page.encode())})
    else:
        typer.echo(str(output))
    if show:
        import webbrowser

        webbrowser.open(output.absolute().as_uri())


def _default_output(records: list[RunRecord], names: list[str]) -> Path:
    """Return the file of the report: in the folder of a run or of runs, or beside the first run."""
    from axonlaunch.config.values.url import is_url

    folder = records[0].path
    if len(names) == 1:
        folder = Path() if is_url(names[0]) else Path(names[0])
        return folder / _PAGE
    joined = "-".join(re.sub(r"[^\w.-]", "_", Path(record.name).name) for record in records)
    page = Path(_PAGE).with_stem(f"report-{joined[:_LONGEST]}")
    if is_url(str(folder)):
        return page
    return (folder.resolve().parent if folder.name in ("", "..") else folder.parent) / page
