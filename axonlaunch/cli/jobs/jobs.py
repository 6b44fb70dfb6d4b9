"""``axonlaunch jobs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from axonlaunch.cli.jobs.options import Context, Namespace, Ray
from axonlaunch.cli.shared.options import Json, print_json
from axonlaunch.system.text.terminal import console_on

HELP = "List jobs of SLURM, Kubernetes and Ray: name, state, folder."
EXAMPLES = """Examples:

\b
  axonlaunch jobs
  axonlaunch jobs --namespace research --json
  axonlaunch jobs --ray ray://head:10001
"""


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that contains the runs of SLURM.")
    ] = Path("runs"),
    context: Context = None,
    namespace: Namespace = None,
    ray: Ray = None,
    as_json: Json = False,
) -> None:
    """List the jobs of runs, those of SLURM first."""
    from axonlaunch.launch.external.submitted_jobs import cluster_of, find_jobs

    cluster = cluster_of(context, namespace)
    rows = []
    is_requested = context is not None or namespace is not None
    jobs, read = find_jobs(folder, cluster, ray, needs_cluster=is_requested)
    for job in jobs:
        now = job.state()
        about = {"name": job.name, "job": job.scheduler, "state": now.name, "run_dir": job.run_dir}
        rows.append({**about, "note": now.note})
    if as_json:
        print_json({"jobs": rows})
        return
    console = console_on()
    if not rows:
        places = [f"{folder} has no jobs of SLURM", *(f"{each} has none" for each in read)]
        console.print("; ".join(places), markup=False, soft_wrap=True)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("run", "job", "state", "folder"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row["name"], row["job"], row["state"].lower(), row["run_dir"])
    console.print(table)
    for row in rows:
        if row["note"]:
            console.print(row["note"], markup=False, soft_wrap=True)
