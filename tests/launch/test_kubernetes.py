"""Runs on a real API server, whose pods are processes of this machine (scripts/kube-up)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command
from launchers import By, kubernetes

from axonlaunch.launch.external.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a cluster."""
    with kubernetes(tmp_path_factory.mktemp("kube")) as folder:
        yield folder


@pytest.fixture
def api(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return the API server."""
    monkeypatch.setenv("KUBECONFIG", str(cluster / "kubeconfig"))
    return Cluster()


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

    _ports = iter(range(23100, 23900))

    def __init__(self, axonlaunch: Command, cluster: Path, faulty: list[str]) -> None:
        self.folder, self.local, self.faulty = axonlaunch.folder, axonlaunch, faulty
        self.cluster = cluster
        self.command = By(axonlaunch.folder, [], {"KUBECONFIG": str(cluster / "kubeconfig")})
        # What an image would have: the module of the model.
        env = [{"name": "PYTHONPATH", "value": str(axonlaunch.folder)}]
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
            f"launch.master_port={next(self._ports)}",
            *overrides,
        ]

    def __call__(self, name: str, *overrides: str, status: int = 0) -> Any:
        return self.command(*self.arguments(name, *overrides), status=status)

    def whole(self) -> list[float]:
        """Return the losses of an undisturbed run on this node."""
        self.local(
            *("train", *self.faulty, "strategy=fsdp", "train.steps=30", "name=whole"),
            *("launch.device=cpu", "launch.threads=1"),
        )
        return self.local.losses("whole")


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
    secret = api.get("Secret", "steady-token")
    assert secret is not None
    assert secret["metadata"]["ownerReferences"][0]["name"] == "steady"
    log = (submit.cluster / "pods").glob("steady-*/log")
    token = secret["data"]["token"]
    assert not any(token in file.read_text() for file in log)
