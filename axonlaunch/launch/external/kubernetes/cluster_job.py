"""The state and the log of a run on Kubernetes, read from its object and its pods."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.problems.errors import INVALID, TRANSIENT
from axonlaunch.launch.external.followed_job import JobState
from axonlaunch.launch.external.kubernetes.cluster import (
    KEYS,
    MANAGER,
    Cluster,
    RefusedError,
    UnreachableError,
)
from axonlaunch.launch.external.kubernetes.kueue import QUEUE, is_queued, workload_of
from axonlaunch.launch.external.kubernetes.manifests import (
    CHECKPOINT_DIR,
    CONTAINER,
    MANAGED_BY,
    NPROC,
    RUN_DIR,
    RUN_LABEL,
)
from axonlaunch.launch.external.kubernetes.pods import (
    exit_code,
    has_log,
    log_time,
    phase,
    pod_index,
    waiting_reason,
)

_Answer = TypeVar("_Answer")
LOST = "UNREACHABLE"
"""State of a job while the API server does not answer."""
_STOPPED = "axonlaunch/stopped"
"""Annotation of a job that the user has stopped. One that a queue suspends comes back by itself."""
_INTERRUPTED, _SIGNAL = 130, 128
"""Exit status of a stopped run, and the least one of a process that a signal has ended."""
_MOST_REFUSALS = 30
"""Number of polls after which a refusal ends the follower; credentials and roles may return."""


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
    _refusals: int | None = None

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
        """Return the current state, with the reason if pods wait.

        Raises:
            ConfigError: The server refuses the first request, or many in a row.
        """
        try:
            now = self._state()
        except UnreachableError as error:
            self._is_lost = True
            note = f"{self.title}: {self.cluster.server} does not answer ({error}); trying again"
            return JobState(LOST, note)
        except RefusedError as refused:
            return self._state_after_refusal(refused)
        self._refusals = 0
        if self._is_lost:
            self._is_lost = False
            return JobState(now.name, now.note or f"{self.title}: connected again", now.status)
        return now

    def has_ended(self) -> bool:
        """Return whether the job can't run again. A stopped one can.

        Raises:
            ConfigError: The server refuses the request.
        """
        now = self.state()
        return now.status is not None and now.name != "STOPPED"

    def _state_after_refusal(self, refused: RefusedError) -> JobState:
        """Return the state of a job that the server does not show.

        Raises:
            ConfigError: The server has never shown the job, or has refused it too often.
        """
        problems = self.cluster.to_issue(refused, self.name)
        if self._refusals is None:
            raise ConfigError(problems)
        self._refusals += 1
        if self._refusals > _MOST_REFUSALS:
            raise ConfigError([*problems, ConfigIssue("", self.left)])
        self._is_lost = True
        return JobState(LOST, f"{self.title}: {problems[0]}; trying again")

    def read_log(self, *, rank: int = 0) -> str:
        """Return the text added to the log of a rank's pods since the last call.

        The text is empty if there is none, and while the server does not answer.
        """
        added = ""
        with suppress(RefusedError, UnreachableError):
            for pod in self.pods():
                if pod_index(pod) == rank // self.nproc and has_log(pod):
                    # An evicted pod, or one of a lost node, has no log; a later one has.
                    with suppress(RefusedError, UnreachableError):
                        added += self._new_lines(pod)
        return added

    def stop(self) -> str:
        """Suspend the job: its pods save a checkpoint and end. Return a line for the user.

        Raises:
            ConfigError: The server refuses it or does not know it, or the job has ended.
        """
        self._suspend(True)
        again = f"resume it with axonlaunch resume {self.name}"
        return f"{self.title} saves a checkpoint and is suspended; {again}"

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
        if now.name == LOST or (now.status is not None and now.name != "STOPPED"):
            again = "; the same axonlaunch train command resumes it" * (now.name == "FAILED")
            raise ConfigError([ConfigIssue("", f"{now.note}{again}")])
        if (now.name in ("SUSPENDED", "STOPPING", "STOPPED")) == is_suspended:
            raise ConfigError([ConfigIssue("", now.note or f"{self.title} is running")])
        workload = retry(
            partial(workload_of, self.cluster, self.kind, self.name), self.cluster, self.name
        )
        if workload is None and now.name == "QUEUED":
            message = f"Kueue has made no Workload for {self.title} yet; try again"
            raise ConfigError([ConfigIssue("", message, is_transient=True)])
        marked: dict[str, Any] = {
            "metadata": {"annotations": {_STOPPED: "true" if is_suspended else None}}
        }
        changes = [(self.kind, self.name, marked)]
        if workload is None:
            marked["spec"] = {"suspend": is_suspended}
        else:
            admitted: dict[str, Any] = {"spec": {"active": not is_suspended}}
            change = ("Workload", workload["metadata"]["name"], admitted)
            changes.insert(0 if is_suspended else 1, change)  # a job with the mark is stopped
        for kind, name, content in changes:
            request = partial(self.cluster.patch, kind, name, content)
            job = retry(request, self.cluster, self.name)
        if workload is None and is_suspended and not job["spec"].get("suspend"):
            message = (
                f"{self.cluster.server} is too old to suspend a {self.kind}; kubectl delete "
                f"{self.kind.lower()} {self.name} ends it after a checkpoint"
            )
            raise ConfigError([ConfigIssue("", message)])

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
            if is_queued(self.cluster, job):
                queue = job["metadata"]["labels"][QUEUE]
                return JobState("QUEUED", f"{self.title} is suspended; waits for the queue {queue}")
            again = f"resume it with axonlaunch resume {self.name}"
            if not _is_stopped(job):
                return JobState("SUSPENDED", f"{self.title} is suspended; {again}")
            if any(phase(pod) == "Running" for pod in self.pods()):
                return JobState("STOPPING", f"{self.title} saves a checkpoint and is suspended")
            return JobState("STOPPED", f"{self.title} is stopped; {again}", _INTERRUPTED)
        pods = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
        waiting = [reason for pod in pods if (reason := waiting_reason(pod))]
        pending = [pod["metadata"]["name"] for pod in pods if phase(pod) == "Pending"]
        if not waiting and pending and (warning := self._last_warning(pending[0])):
            waiting = [f"{pending[0]}: {warning}"]
        if waiting:
            return JobState("PENDING", f"{self.title} waits: {waiting[0]}")
        # Pods that have ended well are counted by the job's controller a moment later.
        if any(phase(pod) in ("Running", "Succeeded") for pod in pods):
            return JobState("RUNNING")
        child = f"{self.name}-{CONTAINER}-0"  # of a JobSet, and so of a TrainJob
        for name in (self.name,) if self.kind == "Job" else (self.name, child):
            if reason := self._last_warning(name, "FailedCreate"):  # by a quota, for example
                return JobState("PENDING", f"{self.title} waits: {reason}")
        return JobState("PENDING", f"{self.title} is pending")

    def _last_warning(self, name: str, reason: str = "") -> str:
        """Return the message of an object's last event if it is a warning; else empty.

        Args:
            name: Name of the object.
            reason: Reason of the events that count; empty: all.
        """
        try:
            events = self.cluster.events(name)
        except RefusedError:  # a role may not list events
            return ""
        counted = [event for event in events if reason in ("", event.get("reason"))]
        if not counted or counted[-1].get("type") != "Warning":
            return ""
        return " ".join(str(counted[-1].get("message", "")).split())

    def _failed_status(self) -> int:
        """Return the exit status of a failed job: that of a pod, if it says why.

        If a pod was killed, as by a lack of memory, a later start will hardly succeed.
        """
        try:
            codes = {exit_code(pod) for pod in self.pods()} - {None}
        except (RefusedError, UnreachableError):
            return 1
        was_killed = any(code > _SIGNAL and code != _INTERRUPTED for code in codes if code)
        found = (INVALID, 1) if was_killed else (INVALID, 1, TRANSIENT)
        return next((status for status in found if status in codes), 1)

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
            moment = log_time(time)
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


def _is_stopped(job: dict[str, Any]) -> bool:
    """Return whether ``axonlaunch stop`` has suspended a job.

    Its mark is not enough: another program may have let the job run since, and suspended it again.
    Then that program manages ``spec.suspend``. In a queue, Kueue always does.
    """
    metadata = job["metadata"]
    if _STOPPED not in (metadata.get("annotations") or {}):
        return False
    managers = {
        entry.get("manager")
        for entry in metadata.get("managedFields") or []
        if "f:suspend" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    return QUEUE in metadata.get("labels", {}) or not managers or MANAGER in managers


def _conditions(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the true conditions of a job by type."""
    conditions = job.get("status", {}).get("conditions") or []
    return {each["type"]: each for each in conditions if each.get("status") == "True"}
