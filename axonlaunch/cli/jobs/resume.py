"""``axonlaunch resume``."""

from __future__ import annotations

from axonlaunch.cli.jobs.options import Context, Namespace, Ray, RunName

HELP = "Resume a stopped job of SLURM, Kubernetes or Ray."
EXAMPLES = """Examples:

\b
  axonlaunch resume gpt-fsdp
"""


def command(
    run: RunName, context: Context = None, namespace: Namespace = None, ray: Ray = None
) -> None:
    """Continue a stopped run from its last checkpoint."""
    from axonlaunch.launch.external.submitted_jobs import cluster_of, find_job

    is_requested = context is not None or namespace is not None
    job = find_job(run, cluster_of(context, namespace), ray, needs_cluster=is_requested)
    print(job.resume())
