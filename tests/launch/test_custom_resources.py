"""JobSets and TrainJobs, checked by a real API server with their own definitions and CEL rules.

scripts/kube-up --build builds the server. The definitions come from the releases of JobSet and
Kubeflow Trainer: put their files into the folder ``definitions`` beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launchers import kubernetes
from support.pod_runs import loaded

from axonlaunch.config import ConfigError
from axonlaunch.launch.external.kubernetes.cluster import Cluster
from axonlaunch.launch.external.kubernetes.cluster_job import ClusterJob, retry
from axonlaunch.launch.external.kubernetes.manifests import build_objects
from axonlaunch.launch.external.kubernetes.resources import PodResources
from axonlaunch.training.loggers.logger import RunInfo
from axonlaunch.training.loggers.trainjob import TrainJobLogger

pytestmark = [pytest.mark.slow, pytest.mark.processes]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonlaunch" / "kube"
DEFINITIONS = Path(os.environ.get("AXONLAUNCH_KUBE") or CACHE) / "definitions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a cluster that knows JobSets and TrainJobs."""
    if not any(DEFINITIONS.glob("*.yaml")):
        pytest.skip(f"no definitions of JobSet and Kubeflow Trainer in {DEFINITIONS}")
    with kubernetes(tmp_path_factory.mktemp("kube"), DEFINITIONS) as folder:
        yield folder


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return the API server for custom resources."""
    monkeypatch.setenv("KUBECONFIG", str(folder / "custom.kubeconfig"))
    return Cluster()


def rendered(kind: str, name: str = "big") -> dict[str, Any]:
    """Return the JobSet or TrainJob of a run with most settings."""
    options = ["queue=gpus", "service_account=trainer", "node_selector={pool: h100}"]
    options += ["volumes=['runs:/runs','corpus:/data:ro']", f"kind={kind}"]
    options += ["tolerations=['nvidia.com/gpu:NoSchedule']"]
    config = loaded(
        *("launch.nproc=8", "launch.nnodes=4", "launch.max_restarts=3", f"name={name}"),
        *(f"launch.kubernetes.{option}" for option in options),
    )
    return build_objects(config, PodResources(memory="40Gi", cpus=8, gpus=8, grace_s=90)).job


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_rendered_object_follows_the_definition_and_its_rules(kind: str, cluster: Cluster) -> None:
    job = rendered(kind)
    made = cluster.create(job, dry=True)
    assert (
        made["spec"].items()
        >= {
            key: value for key, value in job["spec"].items() if not isinstance(value, dict | list)
        }.items()
    )
    assert kind in cluster.known_kinds()


def no_key(job: dict[str, Any]) -> None:
    job["spec"]["replicatedJob"] = job["spec"].pop("replicatedJobs", [])


def no_number(job: dict[str, Any]) -> None:
    job["spec"]["trainer"]["numNodes"] = "four"


def no_ranks(job: dict[str, Any]) -> None:
    job["spec"]["trainer"]["numProcPerNode"] = 0


def other_manager(job: dict[str, Any]) -> None:
    job["spec"]["managedBy"] = "me"


def two_orders(job: dict[str, Any]) -> None:
    (child,) = job["spec"]["replicatedJobs"]
    job["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    job["spec"]["replicatedJobs"].append(
        {**child, "name": "second", "dependsOn": [{"name": child["name"], "status": "Ready"}]}
    )


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("jobset", no_key, 'unknown field "spec.replicatedJob"'),
        ("jobset", two_orders, "StartupPolicy and DependsOn APIs are mutually exclusive"),
        ("trainjob", no_number, "refuses spec.trainer.numNodes: "),
        ("trainjob", no_ranks, "refuses spec.trainer.numProcPerNode: "),
        ("trainjob", other_manager, "refuses spec.managedBy: "),
    ],
)
def test_object_that_breaks_a_rule_is_refused_with_the_reason(
    kind: str, change: Callable[[dict[str, Any]], None], reason: str, cluster: Cluster
) -> None:
    job = rendered(kind)
    change(job)
    with pytest.raises(ConfigError) as refused:
        retry(lambda: cluster.create(job, dry=True), cluster, "big")
    assert reason in str(refused.value)


@pytest.mark.parametrize(("kind", "title"), [("jobset", "JobSet"), ("trainjob", "TrainJob")])
def test_job_is_suspended_and_resumed(kind: str, title: str, cluster: Cluster) -> None:
    name = f"paused-{kind}"
    job = ClusterJob.of_object(cluster, cluster.create(rendered(kind, name)))
    assert "is suspended" in job.stop()
    assert cluster.get(title, name)["spec"]["suspend"] is True  # type: ignore[index]
    assert "resumes" in job.resume()
    assert cluster.get(title, name)["spec"]["suspend"] is False  # type: ignore[index]


def test_progress_fits_the_status_of_a_trainjob(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create(rendered("trainjob", "reported"))
    (tmp_path / "token").write_text("secret")
    certificate = Path(os.environ["KUBECONFIG"]).with_name("custom-certs") / "apiserver.crt"
    values = {"URL": "https://trainer", "CA_CERT": str(certificate), "TOKEN": str(tmp_path)}
    logger = TrainJobLogger({f"KUBEFLOW_TRAINER_SERVER_{k}": v for k, v in values.items()})
    logger.start(RunInfo(name="reported", run_dir=tmp_path, config={"train": {"steps": 200}}))
    logger._metrics, logger._step = {"loss": 2.5, "step_s": 0.5, "perplexity": float("inf")}, 50
    path = f"{cluster.path('TrainJob', 'reported')}/status"
    change = {"status": {"trainerStatus": logger.status()}}
    made = cluster._json("PATCH", path, "change the status of a TrainJob", {}, change)
    assert made["status"]["trainerStatus"]["progressPercentage"] == 25
    assert made["status"]["trainerStatus"]["estimatedRemainingSeconds"] == 75
