"""Finds the jobs of runs that were submitted to SLURM, Kubernetes or Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.launch.external.followed_job import FollowedJob
from axonlaunch.launch.external.kubernetes.cluster import Cluster
from axonlaunch.launch.external.kubernetes.cluster_job import cluster_jobs, retry
from axonlaunch.launch.external.kubernetes.names import object_name
from axonlaunch.launch.external.slurm.slurm_job import NUMBER, SlurmJob

_DEPTH = ("*", "*/*")
"""Where run folders are below a folder: runs, and runs of sweeps."""


def find_jobs(
    folder: Path,
    cluster: Cluster | None,
    ray: str | None = None,
    *,
    needs_cluster: bool = False,
) -> tuple[list[FollowedJob], list[str]]:
    """Return all jobs of run folders below a folder, of a namespace, and of a Ray cluster.

    Args:
        folder: Folder with run folders.
        cluster: The API server and namespace; None if there is no kubeconfig.
        ray: Address of a Ray cluster; None if there is none.
        needs_cluster: Whether the user requested the API server. Otherwise one that does not
            answer or refuses is left out with a note: the kubeconfig may be an old one.

    Returns:
        The jobs, and the namespace and the Ray cluster that were read, in words.

    Raises:
        ConfigError: A requested cluster refuses the request or does not answer.
    """
    files = [file for depth in _DEPTH for file in folder.glob(f"{depth}/{NUMBER}")]
    jobs: list[FollowedJob] = [
        job for file in sorted(files) if (job := SlurmJob.of_folder(file.parent)) is not None
    ]
    read = []
    if cluster is not None:
        on_kubernetes = _jobs_on_kubernetes(cluster, "", needs_cluster)
        if on_kubernetes is not None:
            jobs += on_kubernetes
            read.append(f"the namespace {cluster.namespace} of {cluster.server}")
    if ray is not None and (on_ray := _jobs_on_ray(ray)) is not None:
        jobs += on_ray
        read.append(f"the Ray cluster at {ray}")
    return jobs, read


def find_job(
    run: str, cluster: Cluster | None, ray: str | None = None, *, needs_cluster: bool = False
) -> FollowedJob:
    """Return the job of a run, which is named by its folder or its name.

    If several have the name, the first one is returned that has not ended.

    Args:
        run: Run folder, its name below ``runs``, or the name of the run on Kubernetes or Ray.
        cluster: The API server and namespace; None if there is no kubeconfig.
        ray: Address of a Ray cluster; None if there is none.
        needs_cluster: Whether the user requested the API server, as for ``find_jobs``. Then jobs of
            SLURM are not searched.

    Raises:
        ConfigError: There is no such job, or it can't be looked for.
    """
    searched: list[str] = []
    ended = None
    if not needs_cluster and (of_folder := SlurmJob.of_folder(Path(run))) is not None:
        return of_folder  # a folder names one job
    for job in _jobs_of(run, cluster, ray, needs_cluster, searched):
        if job.state().status is None:
            return job
        ended = ended or job
    if ended is not None:
        return ended
    hint = "axonlaunch jobs lists them"
    for folder in (Path(run, "logs"), Path("runs", run, "logs")):
        if folder.is_dir():
            hint = f"the log of rank N is {folder}/rank_N.log"
    message = f"{run}: there is no job of this name in {' or '.join(searched)}; {hint}"
    raise ConfigError([ConfigIssue("", message)])


def _jobs_of(
    run: str, cluster: Cluster | None, ray: str | None, needs_cluster: bool, searched: list[str]
) -> Iterator[FollowedJob]:
    """Yield the jobs of a run, and add the searched places in words.

    Raises:
        ConfigError: A requested cluster refuses the request or does not answer.
    """
    if not needs_cluster:
        searched.append("a run folder")
        job = SlurmJob.of_folder(Path("runs", run))
        if job is not None:
            yield job
    if cluster is not None:
        on_kubernetes = _jobs_on_kubernetes(cluster, run, needs_cluster)
        if on_kubernetes is not None:
            searched.append(f"the namespace {cluster.namespace}")
            names = (run, _object_name(run))
            yield from (found for found in on_kubernetes if found.name in names)
    if ray is not None and (on_ray := _jobs_on_ray(ray)) is not None:
        searched.append(f"the Ray cluster at {ray}")
        yield from (found for found in on_ray if found.name == run)


def _object_name(run: str) -> str:
    """Return the name that a run has on Kubernetes; empty if it can't have one."""
    try:
        return object_name(run, longest_suffix="")
    except ValueError:
        return ""


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
    cluster: Cluster, run: str, is_requested: bool
) -> Sequence[FollowedJob] | None:
    """Return the runs of a namespace; None if it is left out with a note.

    Raises:
        ConfigError: A requested cluster refuses the request or does not answer.
    """
    try:
        return retry(lambda: cluster_jobs(cluster), cluster, run)
    except ConfigError as error:
        if is_requested:
            raise
        sys.stderr.write(f"note: jobs on Kubernetes are left out: {error}\n")
        return None


def _jobs_on_ray(address: str) -> Sequence[FollowedJob] | None:
    """Return the runs of a Ray cluster. Ray is imported only if there is an address.

    A cluster that only the environment names, and that can't be used, is left out with a note:
    None.
    """
    from axonlaunch.launch.external.ray.ray_job import ray_jobs

    try:
        return ray_jobs(address)
    except ConfigError as error:
        if address != os.environ.get("RAY_ADDRESS"):
            raise
        sys.stderr.write(f"note: jobs on Ray are left out (RAY_ADDRESS={address}): {error}\n")
        return None
