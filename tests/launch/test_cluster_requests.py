"""Requests to the API server of a kubeconfig, sent to a server on this node."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import yaml
from support.pod_runs import loaded

from axonlaunch.config import ConfigError
from axonlaunch.launch.external.kubernetes import launcher
from axonlaunch.launch.external.kubernetes.cluster import Cluster, RefusedError, UnreachableError
from axonlaunch.launch.external.kubernetes.cluster_job import cluster_jobs, retry
from axonlaunch.launch.external.kubernetes.launcher import create_all
from axonlaunch.launch.external.kubernetes.manifests import build_objects
from axonlaunch.launch.external.kubernetes.resources import PodResources
from axonlaunch.launch.external.submitted_jobs import find_job, find_jobs


class Requests(BaseHTTPRequestHandler):
    """Stores objects, and answers as an API server does.

    Attributes:
        seen: Method, path, query and body of each request.
        objects: Objects by path.
        refused: Kinds that are refused with HTTP status 403.
        lost: Methods and kinds that are executed without an answer.
        unlisted: Plural names of kinds whose lists are refused with HTTP status 403.
        kueue: Version of Kueue's API; empty without Kueue.
        status: Status of all answers if not 0.
    """

    seen: list[tuple[str, str, dict[str, str], Any]]
    objects: dict[str, Any]
    refused: set[str]
    unlisted: set[str]
    lost: set[tuple[str, str]]
    kueue: str
    status: int

    @property
    def workloads(self) -> str:
        return f"/apis/kueue.x-k8s.io/{self.kueue or 'none'}/"

    def reply(self, method: str) -> None:
        parsed = urlparse(self.path)
        query = {key: value[0] for key, value in parse_qs(parsed.query).items()}
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.seen.append((method, parsed.path, query, body))
        if self.headers["Authorization"] != "Bearer secret-of-eve":
            self.answer(401, {"message": "Unauthorized"})
        elif self.status:
            self.answer(self.status, {"message": "overloaded"})
        elif method == "GET" and parsed.path.rpartition("/")[2] in self.unlisted:
            self.answer(403, {"message": "User eve cannot list", "details": {}})
        elif parsed.path == "/apis/kueue.x-k8s.io" and self.kueue:
            served = {"groupVersion": f"kueue.x-k8s.io/{self.kueue}"}
            self.answer(200, {"preferredVersion": served})
        elif not parsed.path.startswith(("/api/v1", "/apis/batch/v1", self.workloads)):
            self.answer(404, "404 page not found")
        elif method == "POST":
            self.create(f"{parsed.path}/{body['metadata']['name']}", body, query)
        elif method == "DELETE" and ("DELETE", parsed.path.split("/")[-2]) in self.lost:
            return
        elif method == "DELETE":
            self.objects.pop(parsed.path, None)
            for path, each in [*self.objects.items()]:
                owners = each["metadata"].get("ownerReferences", [])
                if any(owner["uid"] == f"uid of {parsed.path}" for owner in owners):
                    del self.objects[path]
            self.answer(200, {})
        elif method == "PATCH":
            self.objects[parsed.path]["metadata"] |= body.get("metadata", {})
            self.answer(200, self.objects[parsed.path])
        elif parsed.path in self.objects:
            self.answer(200, self.objects[parsed.path])
        elif parsed.path.endswith("s"):
            found = [value for key, value in self.objects.items() if key.startswith(parsed.path)]
            self.answer(200, {"items": found})
        else:
            self.answer(404, {"message": "not found", "details": {"name": "x"}})

    def create(self, path: str, body: Any, query: dict[str, str]) -> None:
        if body["kind"] in self.refused:
            self.answer(403, {"message": f"User eve cannot create {body['kind']}", "details": {}})
        elif path in self.objects:
            self.answer(409, {"message": "already exists", "details": {}})
        else:
            body["metadata"]["uid"] = f"uid of {path}"
            if "dryRun" not in query:
                self.objects[path] = body
                if ("POST", body["kind"]) in self.lost:
                    return
            self.answer(201, body)

    def answer(self, status: int, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.reply("GET")

    def do_POST(self) -> None:
        self.reply("POST")

    def do_PATCH(self) -> None:
        self.reply("PATCH")

    def do_DELETE(self) -> None:
        self.reply("DELETE")

    def log_message(self, *arguments: Any) -> None:
        del arguments


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Requests]]:
    """Return a server that the kubeconfig of the environment names."""
    state = {
        "seen": [],
        "objects": {},
        "refused": set(),
        "unlisted": set(),
        "lost": set(),
        "kueue": "",
        "status": 0,
    }
    handler: type[Requests] = type("Handler", (Requests,), state)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        write_kubeconfig(tmp_path / "kubeconfig", listening.server_address[1])
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield handler
        listening.shutdown()
        thread.join()


def write_kubeconfig(path: Path, port: int) -> None:
    users = {"eve": "secret-of-eve", "old": "expired"}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "eve",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": name, "user": {"token": token}} for name, token in users.items()],
        "contexts": [
            {"name": name, "context": {"cluster": "test", "user": name, "namespace": "research"}}
            for name in users
        ],
    }
    path.write_text(yaml.safe_dump(content))


def submitted(server: type[Requests], *overrides: str) -> None:
    words = ["launch.nproc=1", "launch.nnodes=2", "launch.kubernetes.volumes=['r:/runs']"]
    config = loaded(*words, *overrides)
    objects = build_objects(config, PodResources(memory="1Gi", cpus=1, gpus=0, grace_s=60))
    create_all(objects, Cluster(), "big")


def refusals(server: type[Requests]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        submitted(server)
    return [str(problem) for problem in caught.value.problems]


def test_all_objects_are_checked_by_the_server_before_the_first_is_made(
    server: type[Requests],
) -> None:
    submitted(server)
    posted = [(query, body["kind"]) for method, _, query, body in server.seen if method == "POST"]
    kinds = ["Secret", "ConfigMap", "Service", "Job"]
    assert [kind for _, kind in posted] == kinds * 2
    assert [query.get("dryRun") for query, _ in posted] == ["All"] * 4 + [None] * 4
    assert {query["fieldValidation"] for query, _ in posted} == {"Strict"}
    job = server.objects["/apis/batch/v1/namespaces/research/jobs/big"]
    for path, content in server.objects.items():
        if content["kind"] != "Job":
            assert content["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"], path


def test_nothing_is_left_after_a_refusal(server: type[Requests]) -> None:
    server.refused.add("Job")
    (line,) = refusals(server)
    assert line.startswith("launch.kubernetes.namespace=research: http://127.0.0.1:")
    assert line.endswith("does not allow to create the Job big: User eve cannot create Job")
    assert server.objects == {}


def test_job_whose_creation_got_no_answer_is_deleted(server: type[Requests]) -> None:
    """Without its ConfigMap and Secret, its pods would wait for ever."""
    server.lost.add(("POST", "Job"))
    (line,) = refusals(server)
    assert "does not answer" in line
    assert server.objects == {}
    server.lost.add(("DELETE", "jobs"))
    assert refusals(server)[1] == ("these may be left: kubectl delete --namespace=research job/big")


def test_job_of_another_command_is_kept_if_a_creation_got_no_answer(
    server: type[Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/apis/batch/v1/namespaces/research/jobs/big"

    def create(handler: Requests, path: str, body: Any, query: dict[str, str]) -> None:
        if body["kind"] == "Job" and "dryRun" not in query:
            server.objects[path] = {"kind": "Job", "metadata": {"name": "big", "uid": "other"}}
            return
        original_create(handler, path, body, query)

    original_create = Requests.create
    monkeypatch.setattr(server, "create", create)
    (line,) = refusals(server)
    assert "does not answer" in line
    assert [*server.objects] == [path]


@pytest.mark.parametrize(("status", "lines"), [(404, 1), (403, 2), (409, 2)])
def test_objects_that_may_not_be_deleted_are_named(
    server: type[Requests], status: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.lost.add(("POST", "Job"))
    monkeypatch.setattr(server, "do_DELETE", lambda self: self.answer(status, {"message": "no"}))
    assert len(refusals(server)) == lines


def test_second_job_in_a_run_folder_is_refused(server: type[Requests]) -> None:
    submitted(server)
    jobs = "/apis/batch/v1/namespaces/research/jobs"
    other = json.loads(json.dumps(server.objects[f"{jobs}/big"]))
    other["metadata"]["name"] = "other"
    server.objects.clear()
    server.objects[f"{jobs}/other"] = other
    assert refusals(server) == [
        "run_dir=/runs/big: Job other uses it; stop and delete that one, or choose another"
    ]


def test_second_job_with_the_checkpoints_of_another_is_refused(server: type[Requests]) -> None:
    """Nothing locks a bucket, and runs delete the old checkpoints that they find there."""
    submitted(server, "checkpoint.path=s3://bucket/run")
    with pytest.raises(ConfigError) as caught:
        submitted(server, "checkpoint.path=s3://bucket/run/", "name=other")
    assert [str(problem) for problem in caught.value.problems] == [
        "checkpoint.path=s3://bucket/run/: Job big uses it; stop and delete that one, or choose "
        "another"
    ]
    submitted(server, "checkpoint.path=s3://bucket/more", "name=other")


def test_job_of_the_same_name_is_refused(server: type[Requests]) -> None:
    submitted(server)
    (line,) = refusals(server)
    assert line.startswith("name=big: research has one of this name already")


def end(server: type[Requests], name: str = "Failed") -> dict[str, Any]:
    """Give the submitted job a condition and return it."""
    job: dict[str, Any] = server.objects["/apis/batch/v1/namespaces/research/jobs/big"]
    job["status"] = {"conditions": [{"type": name, "status": "True"}]}
    return job


@pytest.mark.parametrize("condition", ["Failed", "Complete"])
def test_job_that_has_ended_is_replaced_by_a_later_start_of_its_run(
    server: type[Requests], condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_POLL_S", 0.0)
    submitted(server)
    first = end(server, condition)["metadata"]["annotations"]["axonlaunch/submission"]
    submitted(server)
    assert len(server.objects) == 4
    for content in server.objects.values():
        assert content["metadata"]["annotations"]["axonlaunch/submission"] != first
    (deleted,) = [body for method, _, _, body in server.seen if method == "DELETE"]
    assert deleted["propagationPolicy"] == "Foreground"
    assert deleted["preconditions"]["uid"].startswith("uid of ")


def test_job_that_has_ended_in_another_run_folder_is_kept(server: type[Requests]) -> None:
    submitted(server, "run_dir=/runs/other")
    end(server)
    (line,) = refusals(server)
    assert line.startswith("name=big: research has one of this name already")
    assert len(server.objects) == 4


def test_ended_job_is_kept_if_the_server_refuses_the_new_one(server: type[Requests]) -> None:
    submitted(server)
    end(server)
    server.refused.add("Job")
    refusals(server)
    assert len(server.objects) == 4


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_workloads_of_kueue_are_read_in_the_version_that_the_server_prefers(
    server: type[Requests], version: str
) -> None:
    server.kueue = version
    cluster = Cluster()
    assert cluster.has_kueue
    for _ in range(2):
        assert cluster.find("Workload", "a=b") == []
    paths = [path for _, path, _, _ in server.seen]
    listed = f"/apis/kueue.x-k8s.io/{version}/namespaces/research/workloads"
    assert paths == ["/apis/kueue.x-k8s.io", listed, listed]


def test_cluster_without_kueue_is_told_from_one_that_refuses(server: type[Requests]) -> None:
    assert not Cluster().has_kueue
    with pytest.raises(RefusedError, match="401"):
        _ = Cluster("old").has_kueue


def test_missing_page_of_a_proxy_is_no_deleted_job(server: type[Requests]) -> None:
    cluster = Cluster()
    assert cluster.get("Job", "big") is None
    with pytest.raises(RefusedError, match="404"):
        cluster.get("JobSet", "big")


def test_role_for_jobs_only_submits_and_lists_jobs(server: type[Requests]) -> None:
    """The API server authorizes a request before it looks for the kind."""
    server.unlisted |= {"jobsets", "trainjobs"}
    submitted(server)
    cluster = Cluster()
    assert [job.name for job in cluster_jobs(cluster)] == ["big"]
    server.unlisted.add("jobs")
    with pytest.raises(RefusedError, match="403"):
        cluster_jobs(cluster)


def test_unknown_kind_of_job_names_those_that_work(server: type[Requests]) -> None:
    cluster = Cluster()
    body = {"apiVersion": "x", "kind": "JobSet", "metadata": {"name": "big"}}
    server.objects["/apis/batch/v1"] = {}
    with pytest.raises(ConfigError) as caught:
        retry(lambda: cluster.create(body), cluster, "big")
    (problem,) = caught.value.problems
    assert str(problem) == (
        f"launch.kubernetes.kind=jobset: {cluster.server} has no JobSets; use job, or install it"
    )


def test_expired_credentials_are_reported(server: type[Requests]) -> None:
    cluster = Cluster("old")
    with pytest.raises(RefusedError) as caught:
        cluster.find("Pod", "a=b")
    assert caught.value.status == 401
    assert "credentials of the context old" in str(cluster.to_issue(caught.value, "big")[0])


@pytest.mark.parametrize("status", [429, 500, 503])
def test_overloaded_server_may_answer_later(server: type[Requests], status: int) -> None:
    server.status = status
    with pytest.raises(UnreachableError, match=f"HTTP status {status}"):
        Cluster().find("Pod", "a=b")


def test_unreachable_server_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", 1)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    cluster = Cluster()
    with pytest.raises(ConfigError) as caught:
        retry(lambda: cluster.find("Pod", "a=b"), cluster, "big")
    (problem,) = caught.value.problems
    assert "http://127.0.0.1:1 does not answer" in str(problem)
    assert "Connection refused" in str(problem)


def test_unreachable_server_hides_no_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kubeconfig may be that of a cluster which is gone."""
    write_kubeconfig(tmp_path / "kubeconfig", 1)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    (folder / "job.number").write_text("7\n")
    jobs, read = find_jobs(folder.parent, Cluster())
    assert [job.scheduler for job in jobs] == ["SLURM job 7"]
    assert read == []  # so that no message says that the namespace has none
    note = "note: jobs on Kubernetes are left out: launch.kubernetes.context: http://127.0.0.1:1 "
    assert capsys.readouterr().err.startswith(f"{note}does not answer")
    with pytest.raises(ConfigError, match="gone: there is no job of this name in a run folder;"):
        find_job("gone", Cluster())
    with pytest.raises(ConfigError, match="does not answer"):
        find_jobs(folder.parent, Cluster(), needs_cluster=True)


def add_job(server: type[Requests], name: str) -> None:
    """Add a suspended Job of axonlaunch to the namespace."""
    job = {"kind": "Job", "metadata": {"name": name, "uid": "1"}, "spec": {"suspend": True}}
    server.objects[f"/apis/batch/v1/namespaces/research/jobs/{name}"] = job


def test_pods_can_read_the_submission_of_their_job(server: type[Requests]) -> None:
    submitted(server)
    path = "/api/v1/namespaces/research/configmaps/big-config"
    submission = server.objects["/apis/batch/v1/namespaces/research/jobs/big"]["metadata"][
        "annotations"
    ]["axonlaunch/submission"]
    assert server.objects[path]["data"]["submission"] == submission != ""


@pytest.mark.parametrize("ended", [True, False])
def test_job_that_has_ended_hides_no_other_job_of_its_name(
    server: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    state = "COMPLETED" if ended else "RUNNING"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho JobState={state} ExitCode=0:0\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("runs/big").mkdir(parents=True)
    Path("runs/big/job.number").write_text("7\n")
    assert find_job("big", Cluster()).scheduler == "SLURM job 7"
    add_job(server, "big")
    found = "Job in research" if ended else "SLURM job 7"
    assert find_job("big", Cluster()).scheduler == found
    assert find_job("big", Cluster(), needs_cluster=True).scheduler == "Job in research"
    with pytest.raises(ConfigError, match="there is no job of this name in the namespace research"):
        find_job("old", Cluster(), needs_cluster=True)


@pytest.mark.parametrize(("run", "name"), [("Llama3_8B", "llama3-8b"), ("sweep/0", "sweep-0")])
def test_job_on_kubernetes_is_found_by_the_name_of_its_run(
    server: type[Requests], run: str, name: str
) -> None:
    add_job(server, name)
    assert find_job(run, Cluster()).name == name
    with pytest.raises(ConfigError, match="no job of this name"):
        find_job("--", Cluster())


def test_missing_or_broken_kubeconfig_and_unknown_context_are_reported(
    server: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = "^launch.kubernetes.context=somewhere: the kubeconfig has no such context"
    with pytest.raises(ConfigError, match=f"{unknown}; it has eve, old$"):
        Cluster("somewhere")
    (tmp_path / "broken").write_text("contexts: [")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    with pytest.raises(ConfigError, match=r"can't be read \(while parsing a flow"):
        Cluster()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no usable kubeconfig"):
        Cluster()
