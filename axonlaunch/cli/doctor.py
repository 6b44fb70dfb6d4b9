"""``axonlaunch doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from axonlaunch.cli.options import Json, print_json

HELP = "Tell what this machine has and which backends work."
EXAMPLES = """Examples:

\b
  axonlaunch doctor
  axonlaunch doctor --json
"""


def command(
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Where runs are written.")] = Path(
        "runs"
    ),
    as_json: Json = False,
) -> None:
    """Tell what this machine has and which backends work."""
    from axonlaunch.launch.doctor import diagnose

    report = diagnose(run_dir)
    if as_json:
        print_json(report)
        return
    from rich.console import Console

    console = Console(highlight=False)
    for name, value in _rows(report):
        console.print(f"[dim]{name:<13}[/dim]{value}", soft_wrap=True)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("python", report["python"]),
        ("torch", report["torch"]),
        ("platform", report["platform"]),
        ("cores", str(report["cores"])),
        ("memory", f"{report['memory_gib']} GiB"),
    ]
    devices = report["devices"]
    rows += [
        ("accelerator", f"{device['index']}: {device['name']}, {device['memory_gib']} GiB")
        for device in devices
    ]
    if not devices:
        rows.append(("accelerator", report["accelerator"] or "none; ranks compute on the CPU"))
    if report["driver"]:
        rows.append(("driver", report["driver"]))
    nccl = report["nccl"]
    rows.append(("nccl", nccl["version"] if nccl["available"] else nccl["reason"]))
    for name, verdict in report["backends"].items():
        if verdict["works"]:
            took = f"{verdict['ranks']} ranks all-reduced in {verdict['seconds']} s"
            text = f"[green]works[/green]: {took}"
        else:
            text = f"[yellow]does not work[/yellow]: {verdict['reason']}"
        rows.append((f"  {name}", text))
    rows.append(("disk", f"{report['disk_free_gib']} GiB free at {report['run_folder']}"))
    return rows
