"""Answers of a real API server, in this process (scripts/kube-up)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import wait_for
from support.pod_runs import loaded

from axonlaunch.config import ConfigError
from axonlaunch.launch.external.kubernetes.cluster import Cluster
from axonlaunch.launch.external.kubernetes.cluster_job import ClusterJob
from axonlaunch.launch.external.kubernetes.launcher import create_all
from axonlaunch.launch.external.kubernetes.manifests import RunObjects, build_objects
from axonlaunch.launch.external.kubernetes.resources import PodResources

pytestmark = [pytest.mark.slow, pytest.mark.processes]
KINDS = ("Secret", "ConfigMap", "Service", "Job")


def objects_of(name: str, *overrides: str) -> RunObjects:
    """Return the objects of a run of two pods, whose image does not exist."""
    settings = [f"name={name}", "launch.nproc=1", "launch.nnodes=2", *overrides]
    settings += [f"launch.kubernetes.volumes=['runs:/runs/{name}']"]
    settings += ["launch.kubernetes.image=registry.example/missing:1"]
    return build_objects(loaded(*settings), PodResources(memory="1Gi", cpus=1, gpus=0, grace_s=60))


def refusal(api: Cluster, objects: RunObjects) -> str:
    with pytest.raises(ConfigError) as refused:
        create_all(objects, api, objects.name)
    (problem,) = refused.value.problems
    return str(problem)


def objects_left(api: Cluster, name: str) -> list[str]:
    return [kind for kind in KINDS if api.find(kind, f"axonlaunch/run={name}")]


@pytest.fixture
def small(api: Cluster) -> Iterator[Cluster]:
    """Return a new namespace."""
    path = "/api/v1/namespaces"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "small"}}
    api._json("POST", path, "create the namespace", {}, namespace)
    yield Cluster(namespace="small")
    api._json("DELETE", f"{path}/small", "delete the namespace", {}, {})
    wait_for(lambda: all(each != "small" for each in namespaces(api)), seconds=60)


def namespaces(api: Cluster) -> list[str]:
    items = api._json("GET", "/api/v1/namespaces", "list namespaces")["items"]
    return [item["metadata"]["name"] for item in items]


def limit(cluster: Cluster, resource: str, number: int) -> None:
    """Limit a resource of a namespace, and wait until the limit is in force."""
    metadata = {"name": "team"}
    spec = {"hard": {resource: str(number)}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec}
    cluster.create(quota)

    def is_in_force() -> bool:
        found: Any = cluster.get("ResourceQuota", "team")
        return bool(found["status"].get("used"))

    wait_for(is_in_force, seconds=60)


def test_second_run_of_a_name_is_refused_and_harms_no_first(api: Cluster) -> None:
    create_all(objects_of("twice"), api, "twice")
    try:
        message = refusal(api, objects_of("twice", "run_dir=/runs/twice/other"))
        assert message.startswith("name=twice: default has one of this name already")
        assert objects_left(api, "twice") == list(KINDS)
    finally:
        api.delete("Job", "twice")
    wait_for(lambda: not objects_left(api, "twice"), seconds=60)


def test_existing_secret_is_refused_and_kept(api: Cluster) -> None:
    metadata = {"name": "kept-token"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"a": "YQ=="}}
    api.create(secret)
    try:
        message = refusal(api, objects_of("kept"))
        assert "could not create the Secret kept-token" in message
        assert objects_left(api, "kept") == []
        kept: Any = api.get("Secret", "kept-token")
        assert kept["data"] == {"a": "YQ=="}
    finally:
        api.delete("Secret", "kept-token")


def test_quota_of_jobs_is_reported_before_anything_is_made(small: Cluster) -> None:
    limit(small, "count/jobs.batch", 0)
    message = refusal(small, objects_of("many"))
    assert message.startswith("launch.kubernetes.namespace=small: ")
    assert "exceeded quota: team, requested: count/jobs.batch=1" in message
    assert objects_left(small, "many") == []


def test_quota_of_pods_is_why_a_job_waits(small: Cluster) -> None:
    limit(small, "pods", 0)
    objects = objects_of("waiting")
    create_all(objects, small, "waiting")
    job = ClusterJob.of_object(small, objects.job)
    wait_for(lambda: "exceeded quota: team" in job.state().note, seconds=60)
    assert job.state().note.startswith("Job waiting waits: ")


def test_stopped_job_that_another_program_resumes_is_stopped_no_longer(api: Cluster) -> None:
    objects = objects_of("resumed")
    create_all(objects, api, "resumed")
    job = ClusterJob.of_object(api, objects.job)

    def suspend(is_suspended: bool) -> None:
        path, change = api.path("Job", "resumed"), {"spec": {"suspend": is_suspended}}
        api._json("PATCH", path, "suspend", {"fieldManager": "kubectl-patch"}, change)

    job.stop()
    wait_for(lambda: job.state().name == "STOPPED", seconds=60)
    suspend(False)
    assert job.state().name == "PENDING"
    suspend(True)
    assert job.state().name == "SUSPENDED"
    job.resume()
    job.stop()
    assert job.state().name in ("STOPPING", "STOPPED")
    api.delete("Job", "resumed")


def test_credentials_that_the_server_does_not_know_are_reported(
    api: Cluster, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = yaml.safe_load((cluster / "kubeconfig").read_text())
    content["users"][0]["user"]["token"] = "expired"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    message = refusal(Cluster(), objects_of("expired"))
    assert message.startswith("launch.kubernetes.context: https://127.0.0.1:")
    assert message.endswith("does not accept the credentials of the context admin; log in again")
