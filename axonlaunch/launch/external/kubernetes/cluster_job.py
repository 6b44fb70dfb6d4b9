"""The state and the log of a run on Kubernetes, read from its object and its pods."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.problems.errors import INVALID, TRANSIENT
from axonlaunch.launch.external.followed_job import JobState
from axonlaunch.launch.external.kubernetes.cluster import (
    KEYS,
    Cluster,
    RefusedError,
    UnreachableError,
)
from axonlaunch.launch.external.kubernetes.manifests import (
    CHECKPOINT_DIR,
    CONTAINER,
    MANAGED_BY,
    NPROC,
    RUN_DIR,
    RUN_LABEL,
)

_QUEUE, _OWNER = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/job-uid"
"""Labels of Kueue: of a job, and of the Workload that Kueue makes for it."""
_INDEX = "batch.kubernetes.io/job-completion-index"
_Answer = TypeVar("_Answer")
LOST = "UNREACHABLE"
"""State of a job while the API server does not answer."""


@dataclass
class ClusterJob:
    """A run on Kubernetes.

    Attributes:
        cluster: The API server.
        kind: ``Job``, ``JobSet`` or ``TrainJob``.
        name: Name of the object.
        run_dir: Run folder, as the pods see it.
        nproc: Number of ranks of a pod.
        checkpoints: Folder or URL of the checkpoints; empty for the run folder.
    """

    cluster: Cluster
    kind: str
    name: str
    run_dir: str = ""
    nproc: int = 1
    checkpoints: str = ""
    _times: dict[str, tuple[datetime, str]] = field(default_factory=dict)
    _is_lost: bool = False

    @classmethod
    def of_object(cls, cluster: Cluster, job: dict[str, Any]) -> ClusterJob:
        """Return the run of an object that axonlaunch has made."""
        metadata = job["metadata"]
        about = metadata.get("annotations") or {}
        return cls(
            cluster,
            job["kind"],
            metadata["name"],
            about.get(RUN_DIR, ""),
            int(about.get(NPROC, 1)),
            about.get(CHECKPOINT_DIR, ""),
        )

    @property
    def scheduler(self) -> str:
        """The object and its namespace, in words."""
        return f"{self.kind} in {self.cluster.namespace}"

    @property
    def title(self) -> str:
        """The run in words, for messages."""
        return f"{self.kind} {self.name}"

    @property
    def left(self) -> str:
        """Line for the user after Ctrl-C, which does not end the job."""
        return (
            f"{self.title} is still running; axonlaunch logs {self.name} -f follows it, "
            f"axonlaunch stop {self.name} stops it"
        )

    def state(self) -> JobState:
        """Return the current state, with the reason if pods wait."""
        try:
            now = self._state()
        except UnreachableError as error:
            self._is_lost = True
            note = f"{self.title}: {self.cluster.server} does not answer ({error}); trying again"
            return JobState(LOST, note)
        except RefusedError as refused:
            raise ConfigError(self.cluster.to_issue(refused, self.name)) from None
        if self._is_lost:
            self._is_lost = False
            return JobState(now.name, now.note or f"{self.title}: connected again", now.status)
        return now

    def read_log(self, *, rank: int = 0) -> str:
        """Return the text added to the log of a rank's pod since the last call.

        The text is empty if there is none, and while the server does not answer.
        """
        try:
            pods, node = self.pods(), rank // self.nproc
            running = [pod for pod in pods if _index(pod) == node and _has_log(pod)]
            return "".join(self._new_lines(pod) for pod in running)
        except (RefusedError, UnreachableError):
            return ""

    def stop(self) -> str:
        """Suspend the job: its pods save a checkpoint and end. Return a line for the user.

        Raises:
            ConfigError: The server refuses it or does not know it, or the job has ended.
        """
        self._suspend(True)
        return f"{self.title} saves a checkpoint and is suspended; axonlaunch resume {self.name}"

    def resume(self) -> str:
        """Let a suspended job run again, in the same folder. Return a line for the user.

        Raises:
            ConfigError: The server refuses it, or the job has ended.
        """
        self._suspend(False)
        return f"{self.title} resumes; axonlaunch logs {self.name} -f follows it"

    def _suspend(self, is_suspended: bool) -> None:
        """Suspend the job, or let it run. A queue of Kueue would undo a change of the job itself.

        Raises:
            ConfigError: The server refuses it, or the job is suspended, runs or has ended already.
        """
        now = self.state()
        if now.status is not None or now.name == LOST:
            raise ConfigError([ConfigIssue("", now.note)])
        if (now.name == "SUSPENDED") == is_suspended:
            raise ConfigError([ConfigIssue("", now.note or f"{self.title} is running")])
        workload = retry(self._workload, self.cluster, self.name)
        if workload is not None:
            change = {"spec": {"active": not is_suspended}}
            name = workload["metadata"]["name"]
            retry(partial(self.cluster.patch, "Workload", name, change), self.cluster, self.name)
            return
        if now.name == "QUEUED":
            message = f"Kueue has made no Workload for {self.title} yet; try again"
            raise ConfigError([ConfigIssue("", message, is_transient=True)])
        change = {"spec": {"suspend": is_suspended}}
        request = partial(self.cluster.patch, self.kind, self.name, change)
        job = retry(request, self.cluster, self.name)
        if is_suspended and not job["spec"].get("suspend"):
            message = (
                f"{self.cluster.server} is too old to suspend a {self.kind}; kubectl delete "
                f"{self.kind.lower()} {self.name} ends it after a checkpoint"
            )
            raise ConfigError([ConfigIssue("", message)])

    def _workload(self) -> dict[str, Any] | None:
        """Return the object with which Kueue admits the job; None if no queue does.

        Raises:
            RefusedError: The server does not allow it.
            UnreachableError: The server does not answer.
        """
        job = self.cluster.get(self.kind, self.name)
        if job is None or _QUEUE not in job["metadata"].get("labels", {}):
            return None
        found = self._workloads(job)
        return found[0] if found else None

    def _is_queued(self, job: dict[str, Any]) -> bool:
        """Return whether a suspended job waits for a queue of Kueue.

        So does one whose Workload Kueue has not made yet, or which the user may not read.

        Raises:
            RefusedError: The server does not allow it.
            UnreachableError: The server does not answer.
        """
        if _QUEUE not in job["metadata"].get("labels", {}):
            return False
        try:
            workloads = self._workloads(job)
        except RefusedError as refused:
            if refused.status == 403:
                return True
            raise
        return workloads is not None and all(each["spec"].get("active", True) for each in workloads)

    def _workloads(self, job: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the objects with which Kueue admits the job; None if there is no Kueue.

        Raises:
            RefusedError: The server does not allow it.
            UnreachableError: The server does not answer.
        """
        try:
            return self.cluster.find("Workload", f"{_OWNER}={job['metadata']['uid']}")
        except RefusedError as refused:
            if refused.status == 404:  # the label has no effect without Kueue
                return None
            raise

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods of the run, the oldest first.

        Raises:
            RefusedError: The server does not allow it.
            UnreachableError: The server does not answer.
        """
        pods = self.cluster.find("Pod", f"{RUN_LABEL}={self.name}")
        return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def _state(self) -> JobState:
        job = self.cluster.get(self.kind, self.name)
        if job is None:
            return JobState("DELETED", f"{self.title} has been deleted", 1)
        conditions = _conditions(job)
        for name in ("Complete", "Completed"):
            if name in conditions:
                return JobState("COMPLETED", f"{self.title}: completed", 0)
        if (failed := conditions.get("Failed")) is not None:
            reason = f"{failed.get('reason', '')}: {failed.get('message', '')}".strip(": ")
            return JobState("FAILED", f"{self.title}: failed ({reason})", self._failed_status())
        if job["spec"].get("suspend"):
            if self._is_queued(job):
                queue = job["metadata"]["labels"][_QUEUE]
                return JobState("QUEUED", f"{self.title} is suspended; waits for the queue {queue}")
            note = f"{self.title} is suspended; resume it with axonlaunch resume"
            return JobState("SUSPENDED", note)
        pods = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
        waiting = [reason for pod in pods if (reason := waiting_reason(pod))]
        if waiting:
            return JobState("PENDING", f"{self.title} waits: {waiting[0]}")
        if any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
            return JobState("RUNNING")
        if reason := self._refused_pods():
            return JobState("PENDING", f"{self.title} waits: {reason}")
        return JobState("PENDING", f"{self.title} is pending")

    def _refused_pods(self) -> str:
        """Return why the controller can't create pods, such as a quota; empty if it can."""
        failures = [
            event
            for event in self.cluster.events(self.name)
            if event.get("reason") == "FailedCreate"
        ]
        return " ".join(str(failures[-1].get("message", "")).split()) if failures else ""

    def _failed_status(self) -> int:
        """Return the exit status of a failed job: that of a pod, if it says why."""
        try:
            codes = {_exit_code(pod) for pod in self.pods()}
        except (RefusedError, UnreachableError):
            return 1
        return next((status for status in (INVALID, 1, TRANSIENT) if status in codes), 1)

    def _new_lines(self, pod: dict[str, Any]) -> str:
        name = pod["metadata"]["name"]
        last = self._times.get(name)
        # The server filters by seconds, so lines of the last one come again.
        since = "" if last is None else f"{last[0]:%Y-%m-%dT%H:%M:%SZ}"
        text = self.cluster.log(name, CONTAINER, since=since)
        lines = []
        # Progress bars write carriage returns, at which splitlines would divide a line.
        for line in text.split("\n"):
            time, _, content = line.partition(" ")
            moment = _moment(time)
            if moment is not None and (last is None or moment > last):
                lines.append(f"{content}\n")
                self._times[name] = moment
        return "".join(lines)


def cluster_jobs(cluster: Cluster) -> list[ClusterJob]:
    """Return the runs of a namespace, the oldest first.

    Kinds that the server does not know, or that the user may not list, are left out: a role for
    Jobs only is refused JobSets even where the server has none.

    Raises:
        RefusedError: The server does not allow to list any kind.
        UnreachableError: The server does not answer.
    """
    ((label, value),) = MANAGED_BY.items()
    found: list[dict[str, Any]] = []
    refusals: list[RefusedError] = []
    for kind in KEYS:
        try:
            # An entry of a list has no kind.
            found += [{**job, "kind": kind} for job in cluster.find(kind, f"{label}={value}")]
        except RefusedError as refused:
            if refused.status != 403 and not refused.is_unknown_kind:
                raise
            refusals.append(refused)
    if len(refusals) == len(KEYS):
        raise refusals[0]
    found.sort(key=lambda job: str(job["metadata"].get("creationTimestamp", "")))
    return [ClusterJob.of_object(cluster, job) for job in found]


def retry(request: Callable[[], _Answer], cluster: Cluster, name: str) -> _Answer:
    """Send a request of a command that can't go on without its answer.

    Raises:
        ConfigError: The server refuses it or does not answer.
    """
    try:
        return request()
    except RefusedError as refused:
        raise ConfigError(cluster.to_issue(refused, name)) from None
    except UnreachableError as error:
        message = f"{cluster.server} does not answer ({error}); check the cluster and the network"
        problem = ConfigIssue("launch.kubernetes.context", message, is_transient=True)
        raise ConfigError([problem]) from None


def waiting_reason(pod: dict[str, Any]) -> str:
    """Return why a pod does not run: no node for it, no image or another error; else empty."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return f"{name}: {reason}: {waiting.get('message', '')}".rstrip(": ")
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{name}: {condition.get('reason')}: {condition.get('message', '')}"
    return ""


def _conditions(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the true conditions of a job by type."""
    conditions = job.get("status", {}).get("conditions") or []
    return {each["type"]: each for each in conditions if each.get("status") == "True"}


def _index(pod: dict[str, Any]) -> int:
    """Return the number of a pod in its job; 0 for the pod of a job without an index."""
    metadata = pod["metadata"]
    places = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    return int(places.get(_INDEX, 0))


def _has_log(pod: dict[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def _exit_code(pod: dict[str, Any]) -> int | None:
    for container in pod.get("status", {}).get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated")
        if container.get("name") == CONTAINER and ended:
            return int(ended.get("exitCode", 1))
    return None


def _moment(time: str) -> tuple[datetime, str] | None:
    """Return the second of a log line's time, in UTC, and the digits after the point.

    Nodes write their local time, and may omit zeros at the end. A line without a time, such as the
    node's message that a log is being rotated, is not of the run: None.
    """
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT[\d:]{8})(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", time)
    if match is None:
        return None
    second = datetime.fromisoformat(f"{match[1]}{match[3]}").astimezone(UTC)
    return second, (match[2] or "").ljust(9, "0")
