"""Runs on a real API server, whose pods are processes of this machine (scripts/kube-up)."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from support.command import Command, wait_for
from support.launchers import SCRIPTS, By, logged, unused_port

from axonlaunch.launch.external.kubernetes.cluster import Cluster
from axonlaunch.launch.external.kubernetes.cluster_job import waiting_reason

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def submit(axonlaunch: Command, cluster: Path, faulty: list[str]) -> Submission:
    """Return the command that submits runs of a model with a pause in each step."""
    return Submission(axonlaunch, cluster, faulty)


class Submission:
    """Submits runs of two pods with one rank each.

    Attributes:
        command: The command, with the cluster's kubeconfig.
        folder: Working directory of the command.
    """

    _whole: ClassVar[list[float]] = []

    def __init__(self, axonlaunch: Command, cluster: Path, faulty: list[str]) -> None:
        self.folder, self.local, self.faulty = axonlaunch.folder, axonlaunch, faulty
        self.cluster = cluster
        self.command = By(axonlaunch.folder, [], {"KUBECONFIG": str(cluster / "kubeconfig")})
        # What an image would have: the module of the model, and axonlaunch.
        env = [{"name": "PYTHONPATH", "value": f"{axonlaunch.folder}:{SCRIPTS.parent}"}]
        container = {"name": "node", "env": env}
        spec = {"template": {"spec": {"containers": [container]}}}
        (self.folder / "patch.yaml").write_text(yaml.safe_dump({"spec": spec}))

    def arguments(self, name: str, *overrides: str) -> list[str]:
        runs = self.folder / "runs"
        runs.mkdir(exist_ok=True)
        claim = self.cluster / "claims" / self.folder.name.replace("_", "-")[:40].strip("-").lower()
        claim.parent.mkdir(exist_ok=True)
        if not claim.exists():
            claim.symlink_to(runs)
        return [
            *("train", *(word for word in self.faulty if not word.startswith("launch."))),
            *("strategy=fsdp", "train.steps=30", f"name={name}", "launch=kubernetes"),
            *("launch.nnodes=2", "launch.nproc=1", "launch.device=cpu", "launch.threads=1"),
            "launch.kubernetes.image=registry.example/train:1",
            f"launch.kubernetes.volumes=['{claim.name}:{runs}']",
            f"launch.kubernetes.patch={self.folder / 'patch.yaml'}",
            *("launch.kubernetes.memory=1Gi", "launch.kubernetes.grace_s=30"),
            f"launch.master_port={unused_port()}",
            *overrides,
        ]

    def __call__(self, name: str, *overrides: str, status: int = 0) -> Any:
        follower = self.start(name, *overrides)
        output, errors = follower.communicate(timeout=300)
        assert follower.returncode == status, f"{output}\n{errors}"
        return subprocess.CompletedProcess([], status, output, errors)

    def start(self, name: str, *overrides: str) -> Any:
        return self.command.start(*self.arguments(name, *overrides))

    def whole(self) -> list[float]:
        """Return the losses of an undisturbed run on this node, which tests share."""
        if not self._whole:
            self.local(
                *("train", *self.faulty, "strategy=fsdp", "train.steps=30", "name=whole"),
                *("launch.device=cpu", "launch.threads=1"),
            )
            self._whole.extend(self.local.losses("whole"))
        return self._whole

    @contextmanager
    def without_server(self, *, is_frozen: bool = False) -> Iterator[None]:
        """Kill the API server and start it again at the end of the context.

        Args:
            is_frozen: Whether it is only suspended, so that connections are kept but not answered.
        """
        file = self.cluster / "kube-apiserver.pid"
        pid = int(file.read_text())
        if is_frozen:
            os.kill(pid, signal.SIGSTOP)
            try:
                yield
            finally:
                os.kill(pid, signal.SIGCONT)
            return
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        os.kill(pid, signal.SIGKILL)
        try:
            yield
        finally:
            script = 'setsid "$@" >>"$0" 2>&1 </dev/null & echo $!'
            log = str(self.cluster / "kube-apiserver.log")
            started = subprocess.run(
                ["bash", "-c", script, log, *command], capture_output=True, text=True, check=True
            )
            file.write_text(started.stdout)

    def kill(self, pod: dict[str, Any]) -> None:
        """Kill the process of a pod, as a lack of memory does."""
        pid = int((self.cluster / "pods" / pod["metadata"]["name"] / "pid").read_text())
        os.kill(pid, signal.SIGKILL)


def pods_of(api: Cluster, name: str) -> list[dict[str, Any]]:
    """Return the running pods of a run by index."""
    index = "batch.kubernetes.io/job-completion-index"
    running = [
        pod
        for pod in api.find("Pod", f"axonlaunch/run={name}")
        if pod["status"].get("phase") == "Running"
    ]
    return sorted(running, key=lambda pod: str(pod["metadata"]["annotations"][index]))


def is_waiting(pod: dict[str, Any]) -> bool:
    return bool(waiting_reason(pod))


def test_job_of_two_pods_is_followed_to_the_losses_of_a_local_run(
    submit: Submission, api: Cluster
) -> None:
    ran = submit("steady")
    assert "Job steady submitted to default" in ran.stdout
    assert "Job steady: completed" in ran.stdout
    assert "step 30" in ran.stderr
    assert submit.local.losses("steady") == submit.whole()
    listed = json.loads(submit.command("jobs", "--json").stdout)["jobs"]
    (row,) = [each for each in listed if each["name"] == "steady"]
    assert (row["state"], row["run_dir"]) == ("COMPLETED", str(submit.folder / "runs" / "steady"))
    assert "step 30" in submit.command("logs", "steady").stdout
    of_other_pod = submit.command("logs", "steady", "--rank", "1").stdout
    assert "node 1" in of_other_pod
    assert "step 30" not in of_other_pod
    secret = api.get("Secret", "steady-token")
    assert secret is not None
    assert secret["metadata"]["ownerReferences"][0]["name"] == "steady"
    token = base64.b64decode(secret["data"]["token"]).decode()
    logs = [file.read_text() for file in (submit.cluster / "pods").glob("steady-*/log")]
    assert len(logs) == 2
    assert not any(token in text for text in (*logs, ran.stdout, ran.stderr))
    again = submit("steady")  # replaces the job that has ended, and finds the run finished
    assert "Job steady: completed" in again.stdout


@pytest.mark.parametrize(("victim", "restarts"), [(1, 3), (0, 3), (1, 0)])
def test_killed_pod_is_replaced_and_the_run_continues_from_its_checkpoint(
    submit: Submission, api: Cluster, victim: int, restarts: int
) -> None:
    """Without restarts the other pod ends too, and both are replaced once."""
    name, allowed = f"killed-{victim}-{restarts}", f"launch.max_restarts={restarts}"
    follower = submit.start(name, allowed, "model.arguments={pause:0.2}", "checkpoint.every=5")
    logged(submit.folder / "runs" / name / "metrics.jsonl", 12, seconds=300)
    submit.kill(pods_of(api, name)[victim])
    output, errors = follower.communicate(timeout=300)
    assert follower.returncode == 0, f"{output}\n{errors}"
    assert submit.local.losses(name) == submit.whole()


def test_pods_that_are_killed_while_pre_empted_do_not_count_as_failures(
    submit: Submission, api: Cluster
) -> None:
    patch = yaml.safe_load((submit.folder / "patch.yaml").read_text())
    patch["spec"]["backoffLimit"] = 0
    (submit.folder / "patch.yaml").write_text(yaml.safe_dump(patch))
    follower = submit.start("evicted", "model.arguments={pause:0.2}", "checkpoint.every=5")
    logged(submit.folder / "runs/evicted/metrics.jsonl", 12, seconds=300)
    victims = pods_of(api, "evicted")
    for pod in victims:
        # Those who pre-empt or drain do this.
        conditions = [{"type": "DisruptionTarget", "status": "True"}]
        name = pod["metadata"]["name"]
        api.patch("Pod", f"{name}/status", {"status": {"conditions": conditions}})
    for pod in victims:
        submit.kill(pod)
    output, errors = follower.communicate(timeout=300)
    assert follower.returncode == 0, f"{output}\n{errors}"
    assert submit.local.losses("evicted") == submit.whole()


@pytest.mark.parametrize(
    ("override", "status"),
    [("launch.kubernetes.patch=null", 2), ("model.arguments={fault:exception}", 1)],
    ids=["without the module of the model", "failed rank"],
)
def test_run_that_fails_by_itself_ends_the_job_at_once(
    submit: Submission, override: str, status: int
) -> None:
    ran = submit(f"wrong-{status}", override, "launch.max_restarts=1", status=status)
    assert "failed (PodFailurePolicy: Container node of pod wrong-" in ran.stdout


def test_pod_that_starts_late_is_awaited(submit: Submission) -> None:
    (submit.cluster / "late").mkdir()
    (submit.cluster / "late" / "late-1").write_text("30")
    ran = submit("late")
    assert "waiting for 1 of 2 nodes to join: node 1" in ran.stderr
    assert submit.local.losses("late") == submit.whole()


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
def test_follower_survives_an_api_server_that_stops_for_20_seconds(
    submit: Submission, is_frozen: bool
) -> None:
    name = f"deaf-{int(is_frozen)}"
    follower = submit.start(name, "model.arguments={pause:1.4}")
    logged(submit.folder / "runs" / name / "metrics.jsonl", 3, seconds=300)
    with submit.without_server(is_frozen=is_frozen):
        time.sleep(20)
        # A log that grows is rotated.
        for log in (submit.cluster / "pods").glob(f"{name}-*/log"):
            os.truncate(log, 0)
    output, errors = follower.communicate(timeout=400)
    assert follower.returncode == 0, f"{output}\n{errors}"
    assert "does not answer" in output
    assert f"Job {name}: connected again" in output
    assert "step 30" in errors
    assert submit.local.losses(name) == submit.whole()


def test_stopped_and_suspended_job_saves_checkpoints_and_resumes_to_the_same_losses(
    submit: Submission, api: Cluster
) -> None:
    follower = submit.start("paused", "model.arguments={pause:0.5}", "checkpoint.every=100")
    folder = submit.folder / "runs" / "paused"
    logged(folder / "metrics.jsonl", 5, seconds=300)
    stopped = submit.command("stop", "paused").stdout
    assert "saves a checkpoint and is suspended" in stopped
    output, errors = follower.communicate(timeout=100)
    assert follower.returncode == 130, f"{output}\n{errors}"
    assert "Job paused is stopped; resume it with axonlaunch resume paused" in output
    wait_for(lambda: not api.find("Pod", "axonlaunch/run=paused"), seconds=60)
    first = submit.local.summary("paused")
    assert first["status"] == "interrupted"
    assert (folder / "checkpoints" / f"step_{first['steps']}").is_dir()
    assert "is stopped" in submit.command("stop", "paused", status=2).stderr
    assert "Job paused resumes" in submit.command("resume", "paused").stdout
    follower = submit.command.start("logs", "paused", "--follow")
    logged(folder / "metrics.jsonl", first["steps"] + 5, seconds=300)
    # A queue that pre-empts a job does this.
    api.patch("Job", "paused", {"spec": {"suspend": True}})
    wait_for(lambda: not api.find("Pod", "axonlaunch/run=paused"), seconds=60)
    listed = json.loads(submit.command("jobs", "--json").stdout)["jobs"]
    assert [row["state"] for row in listed if row["name"] == "paused"] == ["SUSPENDED"]
    api.patch("Job", "paused", {"spec": {"suspend": False}})
    log, notes = follower.communicate(timeout=400)
    assert follower.returncode == 0, f"{log}\n{notes}"
    assert notes.count("Job paused is suspended; resume it with axonlaunch resume paused") == 1
    assert log.count("resumed from") == 2, log
    assert submit.local.losses("paused") == submit.whole()


def test_deleted_pod_saves_a_checkpoint_and_is_replaced(submit: Submission, api: Cluster) -> None:
    follower = submit.start(
        *("drained", "launch.max_restarts=3", "model.arguments={pause:0.2}", "checkpoint.every=100")
    )
    logged(submit.folder / "runs/drained/metrics.jsonl", 6, seconds=300)
    api.delete("Pod", pods_of(api, "drained")[0]["metadata"]["name"])
    output, errors = follower.communicate(timeout=400)
    assert follower.returncode == 0, f"{output}\n{errors}"
    assert submit.local.losses("drained") == submit.whole()


def test_job_deleted_under_the_follower_ends_it(submit: Submission, api: Cluster) -> None:
    follower = submit.start("deleted", "model.arguments={pause:0.5}")
    logged(submit.folder / "runs/deleted/metrics.jsonl", 2, seconds=300)
    api.delete("Job", "deleted")
    output, _ = follower.communicate(timeout=100)
    assert follower.returncode == 1
    assert "Job deleted has been deleted" in output
    assert submit.local.summary("deleted")["status"] == "interrupted"


def test_interrupt_only_stops_following(submit: Submission, api: Cluster) -> None:
    # The second command has to answer before it ends.
    follower = submit.start("followed", "model.arguments={pause:1.0}")
    logged(submit.folder / "runs/followed/metrics.jsonl", 2, seconds=300)
    follower.send_signal(signal.SIGINT)
    output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 130
    assert "Job followed is still running; axonlaunch logs followed -f follows it" in output
    again = submit("followed", status=2)
    assert "run_dir" in again.stderr or "name" in again.stderr
    assert "Job followed: completed" in submit.command("logs", "followed", "-f").stderr


def names_of(jobs: list[dict[str, Any]], condition: str) -> set[str]:
    """Return the names of the Jobs of the sweep with a condition; empty: those without any."""
    sweep = [job for job in jobs if job["metadata"]["name"].startswith("sweep-")]
    types = {
        job["metadata"]["name"]: [each["type"] for each in job["status"].get("conditions", [])]
        for job in sweep
    }
    return {name for name, found in types.items() if condition in (found or [""])}


def test_each_run_of_a_sweep_is_a_job_and_two_train_at_once(
    submit: Submission, api: Cluster
) -> None:
    settings = ["launch.nnodes=1", "seed=1,2,3", "model.arguments={pause:0.2}"]
    words = [word for word in submit.arguments("sweep", *settings) if "master_port" not in word]
    follower = submit.command.start("train", "-m", "--parallel", "2", *words[1:])
    most = 0

    def all_complete() -> bool:
        nonlocal most
        jobs = api.find("Job", "app.kubernetes.io/managed-by=axonlaunch")
        most = max(most, len(names_of(jobs, "")))
        return names_of(jobs, "Complete") == {"sweep-0", "sweep-1", "sweep-2"}

    wait_for(all_complete, seconds=400)
    output, errors = follower.communicate(timeout=100)
    assert follower.returncode == 0, f"{output}\n{errors}"
    assert most == 2
    assert "[3] Job sweep-2: completed" in output
    listed = json.loads(submit.command("runs", "--json").stdout)["runs"]
    assert {row["run"] for row in listed} == {f"runs/sweep/{number}" for number in range(3)}
    assert {row["status"] for row in listed} == {"done"}
    alone = [word for word in submit.faulty if not word.startswith("launch.")]
    alone += ["strategy=fsdp", "train.steps=30", "name=alone", "seed=2", "launch.nproc=1"]
    submit.local("train", *alone, "launch.device=cpu", "launch.threads=1")
    assert submit.local.losses("sweep/1") == submit.local.losses("alone")


def test_interrupted_sweep_submits_no_other_job(submit: Submission, api: Cluster) -> None:
    settings = ["launch.nnodes=1", "seed=1,2", "model.arguments={pause:0.2}"]
    words = [word for word in submit.arguments("cut", *settings) if "master_port" not in word]
    follower = submit.command.start("train", "-m", "--parallel", "1", *words[1:])
    logged(submit.folder / "runs/cut/0/metrics.jsonl", 2, seconds=300)
    follower.send_signal(signal.SIGINT)
    output, errors = follower.communicate(timeout=60)
    assert follower.returncode == 130, f"{output}\n{errors}"
    assert "1 of 2 runs were not submitted; axonlaunch jobs lists the others" in output
    assert "Job cut-0: completed" in submit.command("logs", "cut-0", "-f").stderr
    assert api.get("Job", "cut-1") is None


def test_refusals_of_the_server_name_the_setting(submit: Submission) -> None:
    image = "launch.kubernetes.patch=null"
    kind = submit("refused", image, "launch.kubernetes.kind=jobset", status=2).stderr
    assert "launch.kubernetes.kind=jobset" in kind
    assert "has no JobSets; use job" in kind
    error = submit("refused", image, "launch.kubernetes.namespace=nowhere", status=2).stderr
    assert "launch.kubernetes.namespace=nowhere: there is no such namespace" in error
    submit.command.variables["KUBECONFIG"] = str(submit.cluster / "viewer.kubeconfig")
    who = submit("refused", image, status=2).stderr
    assert "does not allow to create the Secret refused-token" in who
    assert 'User "viewer" cannot create resource' in who
    left_out = submit.command("jobs").stderr
    assert left_out.startswith("note: jobs on Kubernetes are left out: ")
    requested = submit.command("jobs", "--namespace", "default", status=2).stderr
    assert requested.startswith("error: launch.kubernetes.namespace=default: ")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["launch.nproc=9", "launch.device=auto"], "Unschedulable: 0/1 nodes are available"),
        (["launch.kubernetes.node_selector={pool: a100}"], "didn't match Pod's node affinity"),
        (["launch.kubernetes.image=registry.example/missing:1"], "ImagePullBackOff"),
    ],
)
def test_waiting_pod_says_why(
    submit: Submission, api: Cluster, overrides: list[str], reason: str
) -> None:
    follower = submit.start("waits", "train.global_batch_size=18", *overrides)
    try:
        wait_for(lambda: bool(api.find("Pod", "axonlaunch/run=waits")), seconds=90)
        wait_for(lambda: is_waiting(api.find("Pod", "axonlaunch/run=waits")[0]), seconds=30)
        time.sleep(3)  # for the follower to see it too
    finally:
        follower.send_signal(signal.SIGINT)
        output, _ = follower.communicate(timeout=60)
        api.delete("Job", "waits")
        wait_for(lambda: not api.find("Pod", "axonlaunch/run=waits"), seconds=60)
    assert "Job waits waits: waits-" in output
    assert reason in output
