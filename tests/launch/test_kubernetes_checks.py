"""Settings of runs on Kubernetes that are refused before anything is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pod_runs import loaded

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError
from axonlaunch.config.options.hardware import GIB
from axonlaunch.launch.external import save_time
from axonlaunch.launch.external.kubernetes import checks, manifests, resources, schema
from axonlaunch.planning.records import Estimate, RankEstimate

RUNS = "launch.kubernetes.volumes=['runs:/runs']"


def settings(*overrides: str) -> list[str]:
    named = ["launch=kubernetes", "name=big", "launch.nproc=8"]
    config = configuration.load([*named, *overrides])
    return [str(issue) for issue in checks.setting_issues(config)]


def test_settings_that_a_job_needs_are_all_reported() -> None:
    config = configuration.load(["launch=kubernetes", "launch.nnodes=2:4", "launch.node_rank=1"])
    assert [str(issue) for issue in checks.setting_issues(config)] == [
        "launch.nproc=auto: is required for a job; write the number of devices per pod",
        "launch.nnodes=2:4: a job has a fixed number of pods; write one number",
        "launch.node_rank=1: the job sets it in each pod; remove this setting",
        "launch.kubernetes.image: is required: an image with axonlaunch installed (axonlaunch help "
        "launchers)",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "namespace=My_Team",
            "launch.kubernetes.namespace=My_Team: is not a valid name in Kubernetes: a-z, "
            "digits, - and ., between letters or digits",
        ),
        (
            "tolerations=['gpu=yes=no']",
            "launch.kubernetes.tolerations: 'gpu=yes=no' is not KEY:EFFECT or KEY=VALUE:EFFECT, "
            "with NoSchedule, PreferNoSchedule or NoExecute",
        ),
        (
            "volumes=['runs:relative']",
            "launch.kubernetes.volumes: 'runs:relative' is not CLAIM:/PATH or CLAIM:/PATH:ro, "
            "with the name of a claim in lower case",
        ),
        (
            "memory=8gb",
            "launch.kubernetes.memory=8gb: is no quantity of memory; write one as 200Gi, or auto",
        ),
        (
            "gpu=gpu gpu",
            "launch.kubernetes.gpu=gpu gpu: is no resource; write one as nvidia.com/gpu or "
            "amd.com/gpu",
        ),
        (
            "node_selector={pool: 'a b'}",
            "launch.kubernetes.node_selector=pool: a b: is no label: write {KEY: VALUE}, as "
            "kubectl get nodes --show-labels shows",
        ),
    ],
)
def test_illegal_option_is_refused(override: str, line: str) -> None:
    image = "launch.kubernetes.image=registry.example/train:1"
    assert settings(image, f"launch.kubernetes.{override}") == [line]


def test_run_that_could_not_resume_in_a_new_pod_is_refused() -> None:
    image = "launch.kubernetes.image=registry.example/train:1"
    assert settings(image, "checkpoint.resume=never") == [
        "checkpoint.resume=never: a pod that is replaced could not resume; use auto, and another "
        "name to start new"
    ]


def test_trainjob_refuses_settings_that_its_api_lacks() -> None:
    options = ["image=registry.example/train:1", "kind=trainjob", "secrets=[hub]"]
    words = [f"launch.kubernetes.{option}" for option in options]
    assert settings(*words, "launch.master_port=29500") == [
        "launch.master_port=29500: the job sets it in each pod; remove this setting",
        "launch.kubernetes.secrets=[hub]: a TrainJob can't have it; set it in the runtime, or "
        "use kind=jobset",
    ]


def test_run_folder_is_on_the_first_writable_volume() -> None:
    assert loaded(
        "launch.nproc=1", "launch.kubernetes.volumes=['d:/data:ro','r:/runs']"
    ).run_dir == ("/runs/big")
    with pytest.raises(ConfigError) as caught:
        loaded("launch.nproc=1", "launch.kubernetes.volumes=['d:/data:ro']")
    (problem,) = caught.value.problems
    assert str(problem).startswith("run_dir=auto: the disk of a pod ends with it; mount a claim")
    with pytest.raises(ConfigError):
        loaded("launch.nproc=1", "run_dir=/elsewhere", RUNS)


def test_folder_of_checkpoints_must_be_on_a_volume_too() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("launch.nproc=1", RUNS, "checkpoint.path=/ckpt")
    (problem,) = caught.value.problems
    assert str(problem).startswith("checkpoint.path=/ckpt: the disk of a pod ends with it")
    assert loaded("launch.nproc=1", RUNS, "checkpoint.path=/runs/big/ckpt").run_dir == "/runs/big"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("3rd", "and begin with a letter; use run-3rd"),
        ('"läuft"', "and begin with a letter; use luft"),
        ("a" * 60, "has 60 characters, and names of pods leave 55 of 63; use " + "a" * 55),
    ],
)
def test_name_that_no_pod_can_have_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("launch.nproc=1", f"name={name}", RUNS)
    assert str(caught.value.problems[0]).endswith(message)


def patched(tmp_path: Path, patch: Any, kind: str = "job") -> list[str]:
    """Return the problems of an object with this patch."""
    file = tmp_path / "patch.yaml"
    file.write_text(yaml.safe_dump(patch))
    config = loaded(
        "launch.nproc=1",
        RUNS,
        f"launch.kubernetes.kind={kind}",
        f"launch.kubernetes.patch={file}",
    )
    options = config.launch.kubernetes
    pod = resources.PodResources(memory="4Gi", cpus=1, gpus=1, grace_s=60)
    job = manifests.build_objects(config, pod, checks.read_patch(options)).job
    return schema.schema_problems(job, kind) or checks.rule_problems(job, kind, "big")


def test_patch_with_known_keys_is_accepted(tmp_path: Path) -> None:
    container = {"name": "node", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
    pod = {"containers": [container], "hostNetwork": True}
    template = {"metadata": {"labels": {"team": "vision"}}, "spec": pod}
    spec = {"template": template, "ttlSecondsAfterFinished": 3600}
    assert patched(tmp_path, {"spec": spec}) == []


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        (
            {"spec": {"complitions": 2}},
            "spec.complitions: there is no such key; did you mean completions?",
        ),
        ({"spec": {"backoffLimit": "many"}}, "spec.backoffLimit='many': expected int"),
        (
            {"spec": {"template": {"spec": {"containers": {"name": "node"}}}}},
            "spec.template.spec.containers: expected a list",
        ),
        (
            {"spec": {"template": {"spec": {"restartPolicy": "Always"}}}},
            "changes restartPolicy; the failure policy needs Never",
        ),
        (
            {"metadata": {"name": "other"}},
            "changes metadata.name; write name=... for the run instead of big",
        ),
    ],
)
def test_patch_that_breaks_the_object_is_refused(tmp_path: Path, patch: Any, problem: str) -> None:
    assert problem in patched(tmp_path, patch)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_object_of_a_custom_kind_follows_its_schema(tmp_path: Path, kind: str) -> None:
    assert patched(tmp_path, {"metadata": {"labels": {"team": "vision"}}}, kind) == []


def trainer_pod(**pod: Any) -> dict[str, Any]:
    """Return a patch of the pods of a TrainJob."""
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    spec = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {"runtimePatches": [{"manager": "axonlaunch/launcher", "trainingRuntimeSpec": spec}]}


def test_patch_of_the_pods_of_a_trainjob_keeps_their_volumes(tmp_path: Path) -> None:
    assert patched(tmp_path, {"spec": trainer_pod(nodeSelector={"pool": "h100"})}, "trainjob") == []
    file = tmp_path / "patch.yaml"
    words = [RUNS, "launch.kubernetes.kind=trainjob", f"launch.kubernetes.patch={file}"]
    config = loaded("launch.nproc=1", *words)
    pod = resources.PodResources(memory="4Gi", cpus=1, gpus=1, grace_s=60)
    patch = checks.read_patch(config.launch.kubernetes)
    job = manifests.build_objects(config, pod, patch).job
    template = checks.pod_template(job, "trainjob")
    assert template is not None
    assert template["spec"]["nodeSelector"] == {"pool": "h100"}
    assert len(template["spec"]["volumes"]) == 3


@pytest.mark.parametrize(
    ("kind", "spec", "problem"),
    [
        (
            "jobset",
            {"failurePolicy": {"maxRestart": 2}},
            "spec.failurePolicy.maxRestart: there is no such key; did you mean maxRestarts?",
        ),
        (
            "jobset",
            {"ttlSecondsAfterFinished": "1h"},
            "spec.ttlSecondsAfterFinished='1h': expected int",
        ),
        (
            "jobset",
            {
                "startupPolicy": {"startupPolicyOrder": "InOrder"},
                "replicatedJobs": [{"name": "node", "dependsOn": [{"name": "data"}]}],
            },
            "sets startupPolicyOrder=InOrder and dependsOn, of which a JobSet can have only one",
        ),
        (
            "trainjob",
            {"trainer": {"env": [{"name": "PET_NNODES", "value": "2"}]}},
            "sets PET_NNODES, which Kubeflow Trainer sets itself",
        ),
        (
            "trainjob",
            {"trainer": {"numProcPerNode": 0}},
            "sets numProcPerNode=0; it must be at least 1",
        ),
        (
            "trainjob",
            {"managedBy": "me"},
            "sets managedBy=me; use trainer.kubeflow.org/trainjob-controller or "
            "kueue.x-k8s.io/multikueue",
        ),
        (
            "trainjob",
            {"ttlSecondsAfterFinished": 60},
            "spec.ttlSecondsAfterFinished: there is no such key",
        ),
        (
            "trainjob",
            trainer_pod(hostNetwork=True),
            "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template."
            "spec.template.spec.hostNetwork: there is no such key",
        ),
    ],
)
def test_patch_that_a_custom_kind_does_not_allow_is_refused(
    tmp_path: Path, kind: str, spec: dict[str, Any], problem: str
) -> None:
    assert patched(tmp_path, {"spec": spec}, kind) == [problem]


def test_unknown_key_in_the_pods_of_a_jobset_is_refused(tmp_path: Path) -> None:
    job = {"name": "node", "template": {"spec": {"paralelism": 2}}}
    assert patched(tmp_path, {"spec": {"replicatedJobs": [job]}}, "jobset") == [
        "spec.replicatedJobs[0].template.spec.paralelism: there is no such key; did you mean "
        "parallelism?"
    ]


def estimate(**bytes_of: int) -> Estimate:
    rank = RankEstimate(
        rank=0,
        coords={},
        peak_bytes=bytes_of.get("peak", 0),
        host_bytes=bytes_of.get("host", 0),
        breakdown={"parameters": bytes_of.get("saved", 0), "optimizer": 0},  # type: ignore[arg-type]
        read_bytes=bytes_of.get("read", 0),
    )
    peak = bytes_of.get("peak", 0)
    return Estimate(8, {}, 1, peak, peak, peak, [rank])


def test_memory_of_a_pod_has_the_processes_host_tensors_and_copies_of_saves() -> None:
    config = loaded("launch.nproc=8", RUNS, "checkpoint.async_save=true")
    memory = resources.pod_memory_bytes(config, estimate(host=GIB, saved=2 * GIB, peak=70 * GIB))
    assert memory == pytest.approx((0.25 + 8 * (2 + 1 + 2) * 1.1) * GIB)


def test_memory_of_a_pod_on_the_cpu_has_all_tensors() -> None:
    config = loaded("launch.nproc=2", RUNS, "launch.device=cpu")
    memory = resources.pod_memory_bytes(config, estimate(peak=3 * GIB, read=GIB))
    assert memory == pytest.approx((0.25 + 2 * (0.25 + 3 + 1) * 1.1) * GIB)


def test_memory_of_a_pod_has_the_data_workers_of_each_rank() -> None:
    dataset = ["data=custom", "data.target=images:Images", "data.workers=8", "model=mlp"]
    config = loaded("launch.nproc=8", RUNS, *dataset)
    memory = resources.pod_memory_bytes(config, estimate())
    assert memory == pytest.approx((0.25 + 8 * (2 + 8 * 0.25) * 1.1) * GIB)


def test_grace_period_grows_with_the_checkpoint() -> None:
    config = loaded("launch.nproc=8", RUNS)
    assert save_time.seconds_to_save(config, estimate()) == 60
    saved = estimate(saved=int(10e9), host=int(5e9))
    assert save_time.seconds_to_save(config, saved) == 60 + 8 * 150
