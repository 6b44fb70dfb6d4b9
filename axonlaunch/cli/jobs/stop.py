"""``axonlaunch stop``."""

from __future__ import annotations

from axonlaunch.cli.jobs.options import Context, Namespace, Ray, RunName

HELP = "Stop a job of SLURM, Kubernetes or Ray after a checkpoint."
EXAMPLES = """Examples:

\b
  axonlaunch stop gpt-fsdp
"""


def command(
    run: RunName, context: Context = None, namespace: Namespace = None, ray: Ray = None
) -> None:
    """Let the run save a checkpoint and end. axonlaunch resume continues it."""
    from axonlaunch.launch.external.submitted_jobs import cluster_of, find_job

    is_requested = context is not None or namespace is not None
    job = find_job(run, cluster_of(context, namespace), ray, needs_cluster=is_requested)
    print(job.stop())
