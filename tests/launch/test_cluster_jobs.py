"""Messages about a run on Kubernetes: its states, its log and the refusals of the server."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from axonlaunch.config import ConfigError
from axonlaunch.launch.external import followed_job
from axonlaunch.launch.external.followed_job import JobState, follow_job
from axonlaunch.launch.external.kubernetes.cluster import Cluster, RefusedError, UnreachableError
from axonlaunch.launch.external.kubernetes.cluster_job import ClusterJob

INDEX = "batch.kubernetes.io/job-completion-index"


class Canned:
    """An API server with prepared answers.

    Attributes:
        job: The object of the run; None if it has been deleted.
        pods: Pods of the run.
        workloads: Workloads of Kueue; None without Kueue.
        failures: Events by name of the object.
        refusal: Raised by the next request; None if it succeeds.
        unreadable: Raised by requests for the log of a pod, by its name.
    """

    namespace, server, context = "research", "https://cluster.example", "work"

    def __init__(self, **spec: Any) -> None:
        self.job: dict[str, Any] | None = {"spec": spec, "metadata": {"name": "big"}}
        self.pods: list[dict[str, Any]] = []
        self.workloads: list[dict[str, Any]] | None = []
        self.failures: dict[str, list[dict[str, Any]]] = {}
        self.unreadable: dict[str, Exception] = {}
        self.lines: list[str] = []
        self.refusal: Exception | None = None
        self.knows_suspend = True

    @property
    def has_kueue(self) -> bool:
        return self.workloads is not None

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        return self.job

    def find(self, kind: str, labels: str) -> list[dict[str, Any]]:
        assert kind == "Pod" or labels == "kueue.x-k8s.io/job-uid=uid-of-big"
        return self.pods if kind == "Pod" else self.workloads or []

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.failures.get(name, [])

    def log(self, pod: str, container: str, *, since: str) -> str:
        if pod in self.unreadable:
            raise self.unreadable[pod]
        return "".join(line for line in self.lines if line[:19] >= since[:19])

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> dict[str, Any]:
        assert self.job is not None
        if kind == "Workload":
            assert self.workloads
            self.workloads[0]["spec"] |= change["spec"]
            return self.workloads[0]
        about = self.job["metadata"].setdefault("annotations", {})
        about |= change["metadata"]["annotations"]
        self.job["metadata"]["annotations"] = {k: v for k, v in about.items() if v is not None}
        if self.knows_suspend:
            self.job["spec"] |= change.get("spec", {})
        return self.job

    def to_issue(self, refused: RefusedError, name: str) -> Any:
        return Cluster.to_issue(self, refused, name)  # type: ignore[arg-type]


def job_of(cluster: Canned) -> ClusterJob:
    return ClusterJob(cluster, "Job", "big", "/runs/big", nproc=2)  # type: ignore[arg-type]


def pod(index: int = 0, **status: Any) -> dict[str, Any]:
    metadata = {"name": f"big-{index}-x", "annotations": {INDEX: str(index)}}
    return {"metadata": metadata, "status": status}


def condition(name: str, **more: str) -> dict[str, Any]:
    return {"type": name, "status": "True", **more}


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "node", "state": state}]


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_running_job_has_no_note(phase: str) -> None:
    """Its controller may see later that the pods have succeeded."""
    cluster = Canned()
    cluster.pods = [pod(phase=phase)]
    assert job_of(cluster).state() == JobState("RUNNING")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    }
                ]
            },
            "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            {
                "containerStatuses": container(
                    waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
                )
            },
            "ImagePullBackOff: Back-off pulling image",
        ),
        (
            {
                "containerStatuses": container(
                    waiting={
                        "reason": "CreateContainerConfigError",
                        "message": 'secret "hub-token" not found',
                    }
                )
            },
            'CreateContainerConfigError: secret "hub-token" not found',
        ),
    ],
)
def test_waiting_pod_gives_its_reason(status: dict[str, Any], reason: str) -> None:
    cluster = Canned()
    cluster.pods = [pod(phase="Running"), pod(1, phase="Pending", **status)]
    assert job_of(cluster).state() == JobState("PENDING", f"Job big waits: big-1-x: {reason}")


@pytest.mark.parametrize(
    ("kind", "creator"),
    [("Job", "big"), ("JobSet", "big-node-0"), ("TrainJob", "big-node-0"), ("JobSet", "big")],
)
def test_exceeded_quota_is_the_reason_of_missing_pods(kind: str, creator: str) -> None:
    """The pods of a JobSet, and so those of a TrainJob, are made by a Job below it."""
    cluster = Canned()
    message = "pods big-0 is forbidden: exceeded quota: team, limited: pods=1"
    cluster.failures[creator] = [warning("FailedCreate", message)]
    job = job_of(cluster)
    job.kind = kind
    assert job.state() == JobState("PENDING", f"{kind} big waits: {message}")


def warning(reason: str, message: str, kind: str = "Warning") -> dict[str, Any]:
    return {"type": kind, "reason": reason, "message": message}


def test_volume_that_cannot_be_mounted_is_why_a_pod_waits() -> None:
    cluster = Canned()
    creating = container(waiting={"reason": "ContainerCreating"})
    cluster.pods = [pod(phase="Running"), pod(1, phase="Pending", containerStatuses=creating)]
    assert job_of(cluster).state() == JobState("RUNNING")
    message = 'MountVolume.SetUp failed for volume "token" : secret "big-token" not found'
    cluster.failures["big-1-x"] = [warning("FailedMount", message)]
    assert job_of(cluster).state().note == f"Job big waits: big-1-x: {message}"
    cluster.failures["big-1-x"].append(warning("Pulling", "Pulling image", "Normal"))
    assert job_of(cluster).state() == JobState("RUNNING")


def test_role_that_may_not_list_events_follows_a_pending_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Canned()
    cluster.pods = [pod(phase="Pending")]
    refused = RefusedError(403, {"message": "cannot list events"}, "list events", "")
    monkeypatch.setattr(cluster, "events", Mock(side_effect=refused))
    assert job_of(cluster).state() == JobState("PENDING", "Job big is pending")


def test_suspended_job_names_its_queue() -> None:
    cluster = Canned(suspend=True)
    assert cluster.job is not None
    queue(cluster)
    assert job_of(cluster).state().note == "Job big is suspended; waits for the queue gpus"


@pytest.mark.parametrize(
    ("status", "name"),
    [(None, "QUEUED"), (403, "QUEUED"), (404, "SUSPENDED")],
    ids=["no Workload yet", "may not be read", "no Kueue"],
)
def test_suspended_job_of_a_queue_waits_for_it_until_a_workload_says_otherwise(
    status: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Canned(suspend=True)
    queue(cluster)
    cluster.workloads = None if status == 404 else []
    if status == 403:
        refused = RefusedError(status, {"message": "cannot list"}, "list Workloads", "")
        monkeypatch.setattr(cluster, "find", Mock(side_effect=refused))
    assert job_of(cluster).state().name == name
    refusal = {None: "Kueue has made no Workload", 403: "does not allow to list Workloads"}
    with pytest.raises(ConfigError, match=refusal.get(status, "is suspended")):
        job_of(cluster).stop()


def queue(cluster: Canned) -> None:
    assert cluster.job is not None
    cluster.job["metadata"] |= {
        "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
        "uid": "uid-of-big",
    }
    cluster.workloads = [{"metadata": {"name": "job-big-1"}, "spec": {"active": True}}]


@pytest.mark.parametrize("is_admitted", [True, False])
def test_job_of_a_queue_is_stopped_and_resumed_by_its_workload(is_admitted: bool) -> None:
    """Kueue undoes changes of ``spec.suspend``."""
    cluster = Canned(suspend=not is_admitted)
    cluster.pods = [pod(phase="Running")] if is_admitted else []
    queue(cluster)
    job = job_of(cluster)
    if not is_admitted:
        with pytest.raises(ConfigError, match="waits for the queue gpus"):
            job.resume()
    job.stop()
    assert cluster.workloads
    assert cluster.workloads[0]["spec"] == {"active": False}
    assert cluster.job is not None
    assert cluster.job["spec"] == {"suspend": not is_admitted}
    cluster.job["spec"]["suspend"] = True  # by Kueue
    cluster.pods = []
    assert job.state().name == "STOPPED"
    with pytest.raises(ConfigError, match="is stopped; resume it with axonlaunch resume big"):
        job.stop()
    job.resume()
    assert cluster.workloads[0]["spec"] == {"active": True}
    assert job.state().name == "QUEUED"


def test_complete_job_succeeded() -> None:
    for name in ("Complete", "Completed"):
        cluster = Canned()
        assert cluster.job is not None
        cluster.job["status"] = {"conditions": [condition(name)]}
        assert job_of(cluster).state().status == 0


@pytest.mark.parametrize(("code", "status"), [(1, 1), (2, 2), (75, 75), (137, 1)])
def test_failed_job_has_the_exit_status_of_its_pods(code: int, status: int) -> None:
    cluster = Canned()
    assert cluster.job is not None
    failed = condition("Failed", reason="PodFailurePolicy", message="Container node exited")
    cluster.job["status"] = {"conditions": [failed]}
    ended = container(terminated={"exitCode": code})
    cluster.pods = [pod(phase="Failed", containerStatuses=ended)]
    now = job_of(cluster).state()
    note = "Job big: failed (PodFailurePolicy: Container node exited)"
    assert now == JobState("FAILED", note, status)


@pytest.mark.parametrize(("codes", "status"), [((137, 75), 1), ((130, 75), 75), ((137, 2), 2)])
def test_killed_pod_of_a_failed_job_leaves_no_status_to_try_again(
    codes: tuple[int, ...], status: int
) -> None:
    """A script that starts the job again would do so for ever if memory runs out."""
    cluster = Canned()
    assert cluster.job is not None
    cluster.job["status"] = {"conditions": [condition("Failed", reason="BackoffLimitExceeded")]}
    cluster.pods = [
        pod(index, phase="Failed", containerStatuses=container(terminated={"exitCode": code}))
        for index, code in enumerate(codes)
    ]
    assert job_of(cluster).state().status == status


def test_failed_job_is_resumed_by_the_command_that_started_it() -> None:
    cluster = Canned()
    assert cluster.job is not None
    cluster.job["status"] = {"conditions": [condition("Failed", reason="BackoffLimitExceeded")]}
    with pytest.raises(ConfigError, match="the same axonlaunch train command resumes it"):
        job_of(cluster).resume()


def test_deleted_job_ends_the_follower() -> None:
    cluster = Canned()
    cluster.job = None
    assert job_of(cluster).state() == JobState("DELETED", "Job big has been deleted", 1)


def test_follower_reconnects_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_job, "_POLL_S", 0.0)
    cluster = Canned()
    cluster.refusal = UnreachableError("Connection refused")
    cluster.pods = [pod(phase="Running")]
    said: list[str] = []

    def announce(text: str) -> None:
        said.append(text)
        if "again" in text and "trying" not in text:
            assert cluster.job is not None
            cluster.job["status"] = {"conditions": [condition("Complete")]}

    assert follow_job(job_of(cluster), announce) == (0, "COMPLETED")
    assert said == [
        "Job big: https://cluster.example does not answer (Connection refused); trying again",
        "Job big: connected again",
        "Job big: completed",
    ]


@pytest.mark.parametrize("lasts", [29, 31])
def test_follower_ends_only_after_many_refusals(
    lasts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted server refuses valid credentials until it has read its rules."""
    monkeypatch.setattr(followed_job, "_POLL_S", 0.0)
    cluster = Canned()
    cluster.pods = [pod(phase="Running")]
    refused = RefusedError(401, {"message": "Unauthorized"}, "get the Job big", "Job")
    done = {"conditions": [condition("Complete")]}
    answers = [cluster.job, *[refused] * lasts, {**(cluster.job or {}), "status": done}]
    monkeypatch.setattr(cluster, "get", Mock(side_effect=answers))
    said: list[str] = []
    if lasts < 30:
        assert follow_job(job_of(cluster), said.append) == (0, "COMPLETED")
        assert said[0].endswith("credentials of the context work; log in again; trying again")
    else:
        with pytest.raises(ConfigError, match="Job big is still running; axonlaunch logs big -f"):
            follow_job(job_of(cluster), said.append)


def test_command_for_one_answer_is_refused_at_once() -> None:
    cluster = Canned()
    cluster.refusal = RefusedError(403, {"message": "no"}, "get the Job big", "Job")
    with pytest.raises(ConfigError, match="does not allow to get the Job big: no"):
        job_of(cluster).state()


def test_stopped_job_ends_the_follower_when_its_pods_have_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Canned()
    cluster.pods = [pod(phase="Running")]
    job = job_of(cluster)
    job.stop()
    saves = JobState("STOPPING", "Job big saves a checkpoint and is suspended")
    assert job.state() == saves
    cluster.pods = [pod(phase="Failed")]
    ended = (130, "STOPPED")
    assert follow_job(job, Mock()) == ended
    assert not job.has_ended()  # its folder is in use
    job.resume()
    cluster.pods = [pod(phase="Running")]
    assert job.state() == JobState("RUNNING")


@pytest.mark.parametrize(("manager", "name"), [("axonlaunch", "STOPPED"), ("kueue", "SUSPENDED")])
def test_job_is_stopped_only_if_axonlaunch_has_suspended_it(manager: str, name: str) -> None:
    """The mark of an earlier stop stays if another program resumes the job."""
    cluster = Canned()
    job_of(cluster).stop()
    assert cluster.job is not None
    fields = {"f:spec": {"f:suspend": {}}}
    cluster.job["metadata"]["managedFields"] = [
        {"manager": "axonlaunch", "fieldsV1": {"f:metadata": {"f:annotations": {}}}},
        {"manager": manager, "fieldsV1": fields},
    ]
    assert job_of(cluster).state().name == name


def test_job_that_a_queue_suspends_is_followed_until_it_comes_back() -> None:
    cluster = Canned(suspend=True)
    assert job_of(cluster).state().status is None


@pytest.mark.parametrize(
    "failure",
    [
        RefusedError(400, {"message": "container not found"}, "read the log of big-0-x", ""),
        UnreachableError("Read timed out"),
    ],
    ids=["evicted", "on a lost node"],
)
def test_pod_without_a_log_hides_no_other_log(failure: Exception) -> None:
    cluster = Canned()
    replaced = pod(phase="Failed")
    replaced["metadata"]["name"] = "big-0-evicted"
    after = pod(phase="Failed")
    after["metadata"]["name"] = "big-0-later"
    cluster.pods = [replaced, pod(phase="Running"), after]
    cluster.unreadable = {"big-0-evicted": failure, "big-0-later": failure}
    cluster.lines = ["2026-11-28T10:00:00.1Z step 1\n"]
    assert job_of(cluster).read_log() == "step 1\n"


def test_lines_of_a_log_are_printed_once_also_within_a_second() -> None:
    cluster, time = Canned(), "2026-11-28T10:00:0"
    cluster.pods = [pod(phase="Running"), pod(1, phase="Running")]
    job = job_of(cluster)
    cluster.lines = [f"{time}0.1Z step 1\n", f"{time}0.2Z step 2\n"]
    assert job.read_log() == "step 1\nstep 2\n"
    cluster.lines.append(f"{time}0.3Z step 3\n")
    assert job.read_log() == "step 3\n"
    assert job.read_log() == ""
    # A rotated log has only its last lines.
    cluster.lines = [f"{time}9.1Z step 9\n"]
    assert job.read_log() == "step 9\n"


def test_log_of_a_node_in_another_time_zone_is_printed_once() -> None:
    cluster, requests = Canned(), list[str]()
    cluster.pods = [pod(phase="Running")]
    job = job_of(cluster)

    def log(name: str, container: str, *, since: str) -> str:
        requests.append(since)
        return "".join(cluster.lines)

    cluster.log = log  # type: ignore[method-assign]
    # Zeros at the end of a second's fraction are omitted.
    cluster.lines = ["2026-11-28T01:30:00.1+02:00 step 1\n", "failed to try resolving symlinks\n"]
    assert job.read_log() == "step 1\n"
    cluster.lines.append("2026-11-28T01:30:00.123456789+02:00 step 2\n")
    assert job.read_log() == "step 2\n"
    # The clock of the node was set back.
    cluster.lines.append("2026-11-28T00:30:01+01:00 step 3\n")
    assert job.read_log() == "step 3\n"
    assert requests == ["", "2026-11-27T23:30:00Z", "2026-11-27T23:30:00Z"]


def test_line_of_a_log_ends_only_at_a_line_feed() -> None:
    cluster, time = Canned(), "2026-11-28T10:00:0"
    cluster.pods = [pod(phase="Running")]
    job = job_of(cluster)
    progress = "fetch\r50%\r100%\x0bdone\u2028 next\x85 end"
    cluster.lines = [f"{time}0.1Z {progress}\n", f"{time}0.2Z step 2\n"]
    assert job.read_log() == f"{progress}\nstep 2\n"
    assert job.read_log() == ""


def test_log_of_a_rank_is_that_of_its_pod() -> None:
    cluster = Canned()
    cluster.pods = [pod(phase="Running"), pod(1, phase="Running")]
    requests: list[str] = []

    def log(name: str, container: str, *, since: str) -> str:
        requests.append(name)
        return ""

    cluster.log = log  # type: ignore[method-assign]
    job_of(cluster).read_log(rank=3)
    assert requests == ["big-1-x"]


def test_stop_suspends_and_resume_continues() -> None:
    cluster = Canned()
    cluster.pods = [pod(phase="Running")]
    job = job_of(cluster)
    again = "resume it with axonlaunch resume big"
    assert job.stop() == f"Job big saves a checkpoint and is suspended; {again}"
    with pytest.raises(ConfigError, match="saves a checkpoint and is suspended"):
        job.stop()
    assert job.resume() == "Job big resumes; axonlaunch logs big -f follows it"
    with pytest.raises(ConfigError, match="is running"):
        job.resume()


def test_server_that_drops_suspend_is_reported() -> None:
    cluster = Canned()
    cluster.knows_suspend = False
    with pytest.raises(ConfigError, match="is too old to suspend a Job; kubectl delete job big"):
        job_of(cluster).stop()


@pytest.mark.parametrize(
    ("status", "content", "line"),
    [
        (
            401,
            {"message": "Unauthorized"},
            "launch.kubernetes.context: https://cluster.example does not accept the credentials of "
            "the context work; log in again",
        ),
        (
            403,
            {"message": 'jobs.batch is forbidden: User "eve" cannot create resource "jobs"'},
            "launch.kubernetes.namespace=research: https://cluster.example does not allow to "
            'create the Job big: jobs.batch is forbidden: User "eve" cannot create resource "jobs"',
        ),
        (
            403,
            {"message": "exceeded quota: team, requested: count/jobs.batch=1"},
            "launch.kubernetes.namespace=research: exceeded quota: team, requested: "
            "count/jobs.batch=1",
        ),
        (
            404,
            {"message": 'namespaces "research" not found', "details": {"name": "research"}},
            "launch.kubernetes.namespace=research: there is no such namespace at "
            "https://cluster.example; create it, or write another",
        ),
        (
            409,
            {"message": 'jobs.batch "big" already exists', "details": {"name": "big"}},
            "name=Big: research has one of this name already (could not create the Job big); "
            "choose another name, or end that run with axonlaunch stop and kubectl delete",
        ),
        (
            422,
            {
                "message": "invalid",
                "details": {"causes": [{"field": "spec.completions", "message": "must be > 0"}]},
            },
            "https://cluster.example refuses spec.completions: must be > 0",
        ),
    ],
)
def test_refusal_names_the_setting_to_change(
    status: int, content: dict[str, Any], line: str
) -> None:
    refused = RefusedError(status, content, "create the Job big", "Job")
    assert [str(issue) for issue in Canned().to_issue(refused, "Big")] == [line]


@pytest.mark.parametrize(
    ("field", "is_version"),
    [
        ("spec.runtimePatches", True),
        (
            "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template."
            "spec.template.spec.terminationGracePeriodSeconds",
            True,
        ),
        ("spec.trainer.imag", False),
    ],
)
def test_older_kubeflow_trainer_is_told_from_a_wrong_patch(field: str, is_version: bool) -> None:
    message = f'strict decoding error: unknown field "{field}"'
    refused = RefusedError(400, {"message": message}, "create the TrainJob big", "TrainJob")
    (issue,) = Canned().to_issue(refused, "big")
    expected = "launch.kubernetes.kind=trainjob: needs Kubeflow Trainer 2.3 or later; use jobset"
    assert str(issue).startswith(expected) == is_version
    assert field in str(issue)
