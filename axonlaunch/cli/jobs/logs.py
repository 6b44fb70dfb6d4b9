"""``axonlaunch logs``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from axonlaunch.cli.jobs.options import Context, Namespace, Ray, RunName

HELP = "Print the log of a job of SLURM, Kubernetes or Ray."
EXAMPLES = """Examples:

\b
  axonlaunch logs gpt-fsdp
  axonlaunch logs gpt-fsdp --follow
  axonlaunch logs gpt-fsdp --rank 8
"""


def command(
    run: RunName,
    rank: Annotated[
        int,
        typer.Option(
            metavar="NUMBER",
            min=0,
            help="Rank; on Kubernetes and Ray, the log of its node is printed.",
        ),
    ] = 0,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Continue until the job ends; exit as the job does."),
    ] = False,
    context: Context = None,
    namespace: Namespace = None,
    ray: Ray = None,
) -> None:
    """Print the log of a rank to standard output."""
    from axonlaunch.launch.external.followed_job import follow_job
    from axonlaunch.launch.external.submitted_jobs import cluster_of, find_job

    def announce(text: str) -> None:
        print(text, file=sys.stderr)

    is_requested = context is not None or namespace is not None
    job = find_job(run, cluster_of(context, namespace), ray, needs_cluster=is_requested)
    if follow:
        status, _ = follow_job(job, announce, rank=rank, log=sys.stdout)
        raise typer.Exit(status)
    text = job.read_log(rank=rank)
    sys.stdout.write(text)
    if not text:
        announce(job.state().note or f"{job.name}: rank {rank} has no log yet")
