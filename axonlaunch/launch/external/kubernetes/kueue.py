"""Reads the Workloads with which queues of Kueue admit jobs."""

from __future__ import annotations

from typing import Any

from axonlaunch.launch.external.kubernetes.cluster import Cluster, RefusedError

QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of a job with the name of its queue."""
_OWNER = "kueue.x-k8s.io/job-uid"
"""Label of a Workload with the identifier of its job."""


def workload_of(cluster: Cluster, kind: str, name: str) -> dict[str, Any] | None:
    """Return the Workload of a job; None if no queue admits it.

    Raises:
        RefusedError: The server does not allow it.
        UnreachableError: The server does not answer.
    """
    job = cluster.get(kind, name)
    if job is None or QUEUE not in job["metadata"].get("labels", {}):
        return None
    found = _workloads(cluster, job)
    return found[0] if found else None


def is_queued(cluster: Cluster, job: dict[str, Any]) -> bool:
    """Return whether a suspended job waits for a queue.

    So does one whose Workload Kueue has not made yet, or which the user may not read.

    Raises:
        RefusedError: The server does not allow it.
        UnreachableError: The server does not answer.
    """
    if QUEUE not in job["metadata"].get("labels", {}):
        return False
    try:
        workloads = _workloads(cluster, job)
    except RefusedError as refused:
        if refused.status == 403:
            return True
        raise
    return workloads is not None and all(each["spec"].get("active", True) for each in workloads)


def _workloads(cluster: Cluster, job: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the Workloads of a job; None if the server has no Kueue.

    Raises:
        RefusedError: The server does not allow it.
        UnreachableError: The server does not answer.
    """
    if not cluster.has_kueue:  # the label has no effect
        return None
    return cluster.find("Workload", f"{_OWNER}={job['metadata']['uid']}")
