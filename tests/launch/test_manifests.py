"""Objects of runs on Kubernetes, compared with expected files in this folder and with its schemas.

If a change is intended, the test prints the objects: write them to the file, read the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.pod_runs import loaded

from axonlaunch import config as configuration
from axonlaunch.launch.external.kubernetes import launcher, manifests
from axonlaunch.launch.external.kubernetes.checks import pod_template, read_patch
from axonlaunch.launch.external.kubernetes.launcher import to_text
from axonlaunch.launch.external.kubernetes.resources import PodResources
from axonlaunch.launch.launcher import LaunchOptions

PAGES = Path(configuration.__file__).parents[1] / "docs"
FOLDER = Path(__file__).with_name("manifests")
PODS = ["launch.nproc=8", "launch.nnodes=4", "train.global_batch_size=32", "strategy=hsdp"]
OPTIONS = [
    "launch.kubernetes.namespace=research",
    "launch.kubernetes.queue=gpus",
    "launch.kubernetes.service_account=trainer",
    "launch.kubernetes.node_selector={pool: h100}",
    "launch.kubernetes.tolerations=['nvidia.com/gpu:NoSchedule','pool=train:NoExecute']",
    "launch.kubernetes.volumes=['runs:/runs','corpus:/data:ro']",
]
MORE = ["launch.kubernetes.priority_class=high", "launch.kubernetes.secrets=[hub-token,bucket]"]
JOBS = {
    "job_of_one_pod": ["launch.nproc=8", "launch.kubernetes.volumes=['runs:/runs']"],
    "job_of_several_pods": [*PODS, *OPTIONS, *MORE, "launch.max_restarts=3"],
    "jobset": [*PODS, *OPTIONS, *MORE, "launch.max_restarts=3", "launch.kubernetes.kind=jobset"],
    "trainjob": [*PODS, *OPTIONS, "launch.kubernetes.kind=trainjob"],
    "on_the_cpu_with_a_bucket": [
        *("launch.nproc=2", "launch.device=cpu", "launch.nnodes=2"),
        "checkpoint.path=s3://bucket/big",
    ],
}


def built(*overrides: str) -> manifests.RunObjects:
    config = loaded(*overrides)
    gpus = 0 if config.launch.device == "cpu" else 8
    resources = PodResources(memory="40Gi", cpus=8, gpus=gpus, grace_s=90)
    return manifests.build_objects(config, resources, read_patch(config.launch.kubernetes))


@pytest.mark.parametrize("job", JOBS)
def test_manifest_equals_stored_file(job: str) -> None:
    objects = built(*JOBS[job])
    (config_map, *_) = objects.others
    launch = yaml.safe_load(config_map["data"]["job.yaml"])["launch"]
    shown = ("name", "nproc", "nnodes", "master_addr", "master_port", "token_file")
    # Other tests compare the configuration, which has every key.
    config_map["data"]["job.yaml"] = yaml.safe_dump({key: launch[key] for key in shown})
    text = to_text(objects)
    path = FOLDER / f"{job}.yaml"
    assert text == path.read_text(), f"these objects are no longer those of {path}:\n\n{text}"


def test_failed_run_ends_the_job_and_lost_pods_are_replaced() -> None:
    """Pods restart a failed run themselves; the job must not multiply their restarts."""
    settings = ["launch.nproc=8", "launch.nnodes=4", "train.global_batch_size=32"]
    settings += ["launch.max_restarts=3", "launch.kubernetes.volumes=['runs:/runs']"]
    spec = built(*settings).job["spec"]
    assert spec["backoffLimit"] == 12
    disrupted, ended, stopped = spec["podFailurePolicy"]["rules"]
    assert (ended["action"], ended["onExitCodes"]["values"]) == ("FailJob", [1, 2])
    assert disrupted["action"] == stopped["action"] == "Ignore"
    assert stopped["onExitCodes"]["values"] == [130]


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_lost_pod_is_replaced_once_without_restarts(kind: str) -> None:
    """With it end the other pods, of which each counts."""
    words = [*PODS, "launch.kubernetes.volumes=['runs:/runs']", f"launch.kubernetes.kind={kind}"]
    spec = built(*words).job["spec"]
    if kind == "job":
        assert spec["backoffLimit"] == 4
    else:
        assert spec["failurePolicy"]["maxRestarts"] == 1
    pod = spec if kind == "job" else spec["replicatedJobs"][0]["template"]["spec"]
    tolerated = {each["key"]: each for each in pod["template"]["spec"]["tolerations"]}
    for trouble in ("not-ready", "unreachable"):
        assert tolerated[f"node.kubernetes.io/{trouble}"]["tolerationSeconds"] == 30


def test_services_set_no_variables_in_pods() -> None:
    """A Service named ``master`` would set ``MASTER_PORT``, which names the meeting point."""
    for kind, expected in (("job", False), ("trainjob", None)):
        words = ["launch.kubernetes.volumes=['runs:/runs']", f"launch.kubernetes.kind={kind}"]
        template = pod_template(built("launch.nproc=8", *words).job, kind)
        assert template is not None
        assert template["spec"].get("enableServiceLinks") == expected


def test_manifests_of_several_runs_are_separate_documents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resources = PodResources(memory="40Gi", cpus=8, gpus=8, grace_s=90)
    monkeypatch.setattr(launcher, "pod_resources", lambda *arguments: resources)
    options = LaunchOptions(fork_server=None, started=0.0, render=True)  # type: ignore[arg-type]
    for name in ("lr/0", "lr/1"):
        words = ["launch.nproc=8", "launch.kubernetes.volumes=['runs:/runs']", f"name={name}"]
        launcher.launch(loaded(*words), options)
    documents = [each for each in yaml.safe_load_all(capsys.readouterr().out) if each]
    assert [document["kind"] for document in documents] == ["ConfigMap", "Job"] * 2


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("job", JOBS)
def test_manifest_follows_the_strict_schema_of_kubernetes(job: str, version: str) -> None:
    objects = built(*JOBS[job])
    for each in objects.others:
        kubernetes_validate.validate(each, version, strict=True)
    if objects.job["kind"] == "Job":
        kubernetes_validate.validate(objects.job, version, strict=True)
    elif objects.job["kind"] == "JobSet":
        (child,) = objects.job["spec"]["replicatedJobs"]
        one = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}}
        kubernetes_validate.validate({**one, **child["template"]}, version, strict=True)


def test_configuration_in_the_manifest_is_that_of_the_run() -> None:
    objects = built(*JOBS["job_of_several_pods"])
    text = objects.others[0]["data"]["job.yaml"]
    read: dict[str, Any] = yaml.safe_load(text)
    expected = yaml.safe_load(configuration.to_yaml(loaded(*JOBS["job_of_several_pods"])))
    assert {**read, "launch": None} == {**expected, "launch": None}
    assert read["run_dir"] == "/runs/big"


def test_manifest_has_no_token() -> None:
    text = to_text(built(*JOBS["job_of_several_pods"]))
    documents = [each for each in yaml.safe_load_all(text) if each]
    assert [each["kind"] for each in documents] == ["ConfigMap", "Service", "Job"]
    assert "kubectl create secret generic big-token" in text


def test_only_pods_with_a_service_account_get_a_token_of_the_api_server() -> None:
    claim = ["launch.nproc=8", "launch.kubernetes.volumes=['runs:/runs']"]
    pod = built(*claim).job["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    pod = built(*claim, "launch.kubernetes.service_account=lab").job["spec"]["template"]["spec"]
    assert "automountServiceAccountToken" not in pod


def test_patch_of_the_page_makes_pods_legal_in_a_restricted_namespace(tmp_path: Path) -> None:
    """The rules are those of https://kubernetes.io/docs/concepts/security/pod-security-standards."""
    page = (PAGES / "launchers.md").read_text()
    patch = page.partition("# patch.yaml\n")[2].partition("```")[0]
    (tmp_path / "patch.yaml").write_text(patch)
    claim = ["launch.nproc=8", "launch.kubernetes.volumes=['runs:/runs']"]
    objects = built(*claim, f"launch.kubernetes.patch={tmp_path}/patch.yaml")
    kubernetes_validate.validate(objects.job, "1.37", strict=True)
    pod = objects.job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    kinds = {key for volume in pod["volumes"] for key in volume} - {"name"}
    assert kinds <= {"configMap", "emptyDir", "secret", "persistentVolumeClaim"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


@pytest.mark.parametrize(
    ("name", "legal"),
    [("Llama3_8B.fsdp", "llama3-8b-fsdp"), ("sweep/0", "sweep-0"), ("run-", "run"), ("a" * 53, "")],
)
def test_run_names_are_made_legal(name: str, legal: str) -> None:
    config = loaded("launch.nproc=1", f"name={name}", "launch.kubernetes.volumes=[runs:/runs]")
    assert manifests.run_name(config) == legal or name


def test_patch_is_merged_by_key_and_by_name() -> None:
    value = {
        "spec": {
            "containers": [{"name": "node", "image": "one", "args": ["a", "b"]}],
            "priority": 1,
        }
    }
    patch = {
        "spec": {
            "containers": [{"name": "node", "args": ["c"]}, {"name": "side", "image": "two"}],
            "priority": None,
            "hostIPC": True,
        }
    }
    assert manifests.merge_patch(value, patch) == {
        "spec": {
            "containers": [
                {"name": "node", "image": "one", "args": ["c"]},
                {"name": "side", "image": "two"},
            ],
            "hostIPC": True,
        }
    }
