"""Finds the jobs of runs that were submitted to SLURM, Kubernetes or Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.launch.external.followed_job import FollowedJob
from axonlaunch.launch.external.kubernetes.cluster import Cluster
from axonlaunch.launch.external.kubernetes.cluster_job import cluster_jobs, retry
from axonlaunch.launch.external.slurm import NUMBER, SlurmJob

_DEPTH = ("*", "*/*")
"""Where run folders are below a folder: runs, and runs of sweeps."""


def find_jobs(
    folder: Path,
    cluster: Cluster | None,
    ray: str | None = None,
    *,
    needs_cluster: bool = False,
) -> list[FollowedJob]:
    """Return all jobs of run folders below a folder, of a namespace, and of a Ray cluster.

    Args:
        folder: Folder with run folders.
        cluster: The API server and namespace; None if there is no kubeconfig.
        ray: Address of a Ray cluster; None if there is none.
        needs_cluster: Whether the user requested the API server. Otherwise one that does not
            answer or refuses is left out with a note: the kubeconfig may be an old one.

    Raises:
        ConfigError: A requested cluster refuses the request or does not answer.
    """
    files = [file for depth in _DEPTH for file in folder.glob(f"{depth}/{NUMBER}")]
    jobs: list[FollowedJob] = [
        job for file in sorted(files) if (job := SlurmJob.of_folder(file.parent)) is not None
    ]
    jobs += _jobs_on_kubernetes(cluster, "", needs_cluster) or ()
    return [*jobs, *_jobs_on_ray(ray)]


def find_job(
    run: str, cluster: Cluster | None, ray: str | None = None, *, needs_cluster: bool = False
) -> FollowedJob:
    """Return the job of a run, which is named by its folder or its name.

    Args:
        run: Run folder, its name below ``runs``, or the name of the run on Kubernetes or Ray.
        cluster: The API server and namespace; None if there is no kubeconfig.
        ray: Address of a Ray cluster; None if there is none.
        needs_cluster: Whether the user requested the API server, as for ``find_jobs``.

    Raises:
        ConfigError: There is no such job, or it can't be looked for.
    """
    folders = (Path(run), Path("runs", run))
    for folder in folders:
        job = SlurmJob.of_folder(folder)
        if job is not None:
            return job
    on_kubernetes = _jobs_on_kubernetes(cluster, run, needs_cluster)
    for found in on_kubernetes or ():
        if found.name == run:
            return found
    for on_ray in _jobs_on_ray(ray):
        if on_ray.name == run:
            return on_ray
    searched = "no run folder has a job of SLURM"
    if cluster is not None and on_kubernetes is not None:
        searched = f"neither a run folder nor the namespace {cluster.namespace} has a job"
    if ray is not None:
        searched += f", nor the Ray cluster at {ray},"
    message = f"{run}: {searched} of this name; axonlaunch jobs lists them"
    if logs := next((folder / "logs" for folder in folders if (folder / "logs").is_dir()), None):
        message = f"{run}: {searched} of this name; the log of rank N is {logs}/rank_N.log"
    raise ConfigError([ConfigIssue("", message)])


def cluster_of(context: str | None, namespace: str | None) -> Cluster | None:
    """Return the cluster of the kubeconfig; None if there is none and none was requested.

    Raises:
        ConfigError: A context or namespace was requested that can't be used.
    """
    try:
        return Cluster(context, namespace)
    except ConfigError:
        if context is None and namespace is None:
            return None
        raise


def _jobs_on_kubernetes(
    cluster: Cluster | None, run: str, is_requested: bool
) -> Sequence[FollowedJob] | None:
    """Return the runs of a namespace; None if there is no cluster, or it is left out with a note.

    Raises:
        ConfigError: A requested cluster refuses the request or does not answer.
    """
    if cluster is None:
        return None
    try:
        return retry(lambda: cluster_jobs(cluster), cluster, run)
    except ConfigError as error:
        if is_requested:
            raise
        sys.stderr.write(f"note: jobs on Kubernetes are left out: {error}\n")
        return None


def _jobs_on_ray(address: str | None) -> Sequence[FollowedJob]:
    """Return the runs of a Ray cluster. Ray is imported only if there is an address.

    A cluster that only the environment names, and that can't be used, is left out with a note.
    """
    if address is None:
        return []
    from axonlaunch.launch.external.ray.ray_job import ray_jobs

    try:
        return ray_jobs(address)
    except ConfigError as error:
        if address != os.environ.get("RAY_ADDRESS"):
            raise
        sys.stderr.write(f"note: jobs on Ray are left out (RAY_ADDRESS={address}): {error}\n")
        return []
