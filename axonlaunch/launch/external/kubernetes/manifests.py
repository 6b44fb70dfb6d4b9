"""Builds the objects of a run on Kubernetes as plain values.

A pod is a node: it runs ``axonlaunch train`` with the configuration in a ConfigMap and starts its
ranks. The secret that nodes share is in a Secret, which is not among the returned objects.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.config.options.launch import KubernetesConfig
from axonlaunch.config.problems.errors import INVALID
from axonlaunch.launch.environment.environment_variables import POD_SUBMISSION
from axonlaunch.launch.external.kubernetes.kueue import QUEUE
from axonlaunch.launch.external.kubernetes.names import Volume, object_name, toleration
from axonlaunch.launch.external.kubernetes.resources import PodResources
from axonlaunch.launch.multinode.token import POD_FILE

RUN_LABEL = "axonlaunch/run"
"""Label of all objects of a run; its value is the name of the object."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "axonlaunch"}
"""Label of all objects that axonlaunch makes."""
RUN_DIR = "axonlaunch/run-dir"
"""Annotation with the run folder, as the pods see it."""
CHECKPOINT_DIR = "axonlaunch/checkpoints"
"""Annotation with the folder or URL of the checkpoints, if it is not the run folder."""
NPROC = "axonlaunch/nproc"
"""Annotation with the number of ranks of a pod."""
CONTAINER = "node"
"""Name of the container, which Kubeflow's runtimes use too."""
PORT = 29500
_CONFIG = str(PurePosixPath(POD_SUBMISSION).parent)
_API = {
    "job": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
}
_LOST_S = 30
"""Seconds after which pods of an unreachable node are replaced, by default 300: the others wait."""
_FAILED, _INTERRUPTED = 1, 130
"""Exit statuses of the command."""


@dataclass(frozen=True)
class RunObjects:
    """Objects of a run.

    Attributes:
        name: Name of all of them.
        nnodes: Number of pods.
        job: The Job, JobSet or TrainJob.
        others: Objects that it needs: the ConfigMap, and the Service of a Job.
        secret: Name of the Secret with the token of the nodes; empty for one node.
    """

    name: str
    nnodes: int
    job: dict[str, Any]
    others: list[dict[str, Any]]
    secret: str = ""

    @property
    def pods(self) -> str:
        """Label selector of the pods."""
        return f"{RUN_LABEL}={self.name}"


def run_name(config: RunConfig) -> str:
    """Return the name of a run's objects.

    Raises:
        ValueError: ``name`` can't be made a legal one.
    """
    pods = int(config.launch.nnodes)
    infix = "" if config.launch.kubernetes.kind == "job" else f"-{CONTAINER}-0"
    return object_name(str(config.name), longest_suffix=f"{infix}-{pods - 1}")


def build_objects(config: RunConfig, resources: PodResources, patch: Any = None) -> RunObjects:
    """Return the objects of a run.

    Args:
        config: Checked configuration with resolved ``name``, ``run_dir`` and ``launch.nproc``.
        resources: Resources of each pod.
        patch: Content of ``launch.kubernetes.patch``; None if there is none.
    """
    options, name, nnodes = config.launch.kubernetes, run_name(config), int(config.launch.nnodes)
    secret = f"{name}-token" if nnodes > 1 and config.launch.token_file is None else ""
    others = [_config_map(config, name, secret)]
    pod = _pod(config, name, secret, resources)
    if options.kind == "job":
        job = _job(config, name, pod)
        others += [_service(name)] if nnodes > 1 else []
    elif options.kind == "jobset":
        job = _job_set(config, name, pod)
    else:
        job = _train_job(config, name, pod)
    labels = _labels(name)
    if options.queue:
        labels[QUEUE] = options.queue
    about = {RUN_DIR: config.run_dir, NPROC: str(config.launch.nproc)}
    if config.checkpoint.path is not None:
        about[CHECKPOINT_DIR] = config.checkpoint.path
    metadata = {"name": name, "labels": labels, "annotations": about}
    version, kind = _API[options.kind]
    job = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": job}
    if patch is not None:
        job = merge_patch(job, patch)
    for manifest in [job, *others]:
        if options.namespace:
            manifest["metadata"]["namespace"] = options.namespace
    return RunObjects(name, nnodes, job, others, secret)


def merge_patch(value: Any, patch: Any) -> Any:
    """Return a value with a patch merged into it.

    Mappings are merged by key, and null removes a key. Lists of mappings with a ``name``, or with a
    ``manager`` as the patches of a TrainJob, are merged by it; all other values are replaced.
    """
    if isinstance(value, dict) and isinstance(patch, dict):
        merged = {**value}
        for key, change in patch.items():
            if change is None:
                merged.pop(key, None)
            else:
                merged[key] = merge_patch(merged.get(key), change)
        return merged
    for key in ("name", "manager"):
        if all(_has_key(each, key) for each in (value, patch)):
            by_key = {entry[key]: entry for entry in value}
            for change in patch:
                by_key[change[key]] = merge_patch(by_key.get(change[key]), change)
            return list(by_key.values())
    return deepcopy(patch)


def _has_key(value: Any, key: str) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and key in e for e in value)


def _labels(name: str) -> dict[str, str]:
    return {**MANAGED_BY, RUN_LABEL: name}


def _config_map(config: RunConfig, name: str, secret: str) -> dict[str, Any]:
    """Return the ConfigMap with the configuration that the pods read."""
    kind, nnodes = config.launch.kubernetes.kind, int(config.launch.nnodes)
    settings: dict[str, Any] = {"launch.name": "auto"}
    if nnodes > 1 and kind != "trainjob":  # whose pods have Kubeflow's variables
        first = f"{name}-0.{name}" if kind == "job" else f"{name}-{CONTAINER}-0-0.{name}"
        port = config.launch.master_port
        settings |= {
            "launch.master_addr": first,
            "launch.master_port": PORT if port == "auto" else port,
        }
    if secret:
        settings["launch.token_file"] = POD_FILE
    # Pods don't need the options of the cluster.
    settings["launch.kubernetes"] = KubernetesConfig()
    text = configuration.to_yaml(configuration.with_values(config, settings))
    metadata = {"name": f"{name}-config", "labels": _labels(name)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"job.yaml": text},
    }


def _service(name: str) -> dict[str, Any]:
    """Return the headless Service that gives each pod of a Job a host name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": _labels(name)},
        "spec": {
            "clusterIP": "None",
            "selector": {RUN_LABEL: name},
            # Nodes meet before any of them is ready.
            "publishNotReadyAddresses": True,
        },
    }


def _pod(config: RunConfig, name: str, secret: str, resources: PodResources) -> dict[str, Any]:
    """Return the specification of a pod, without a restart policy."""
    options = config.launch.kubernetes
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{name}-config"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": _CONFIG, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if secret:
        # The file belongs to root, and the image may have another user.
        volumes.append({"name": "token", "secret": {"secretName": secret, "defaultMode": 0o444}})
        folder = str(PurePosixPath(POD_FILE).parent)
        mounts.append({"name": "token", "mountPath": folder, "readOnly": True})
    for number, text in enumerate(options.volumes):
        volume, label = Volume.parse(text), f"claim-{number}"
        volumes.append({"name": label, "persistentVolumeClaim": {"claimName": volume.claim}})
        mount: dict[str, Any] = {"name": label, "mountPath": volume.path}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    limits: dict[str, Any] = {"memory": resources.memory}
    if resources.gpus:
        limits[options.gpu] = resources.gpus
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "command": ["axonlaunch", "train", "--config-dir", _CONFIG, "--config-name", "job"],
        "resources": {"requests": {"cpu": resources.cpus, **limits}, "limits": limits},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if options.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in options.secrets]
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": resources.grace_s,
        # A Service named "master" would set MASTER_PORT to its address.
        "enableServiceLinks": False,
    }
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    else:  # a run does not call the API server
        pod["automountServiceAccountToken"] = False
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    pod["tolerations"] = [toleration(text) for text in options.tolerations] + [
        {
            "key": f"node.kubernetes.io/{trouble}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _LOST_S,
        }
        for trouble in ("not-ready", "unreachable")
    ]
    return pod


def _job(config: RunConfig, name: str, pod: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of an Indexed Job, of which each pod is a node."""
    nnodes = int(config.launch.nnodes)
    if nnodes > 1:
        pod = {**pod, "subdomain": name}
    return {
        "completionMode": "Indexed",
        "completions": nnodes,
        "parallelism": nnodes,
        # For lost pods. Without restarts, or if it is that of node 0, all nodes exit, and each of
        # their pods counts.
        "backoffLimit": _replacements(config) * nnodes,
        "podFailurePolicy": _failure_policy(),
        "template": {
            "metadata": {"labels": _labels(name)},
            "spec": {**pod, "restartPolicy": "Never"},
        },
    }


def _replacements(config: RunConfig) -> int:
    """Return how often killed pods are replaced; those of a lost node once without restarts too."""
    return max(int(int(config.launch.nnodes) > 1), config.launch.max_restarts)


def _failure_policy() -> dict[str, Any]:
    """Return the rules for a pod that fails: the first that matches, or it counts as a restart."""
    return {
        "rules": [
            # The node was lost, drained or pre-empted, whatever the run made of it.
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": CONTAINER,
                    "operator": "In",
                    # The run has failed, after its restarts in the pods; or the configuration is
                    # wrong.
                    "values": [_FAILED, INVALID],
                },
            },
            # Another pod was stopped, and the run saved a checkpoint.
            {
                "action": "Ignore",
                "onExitCodes": {
                    "containerName": CONTAINER,
                    "operator": "In",
                    "values": [_INTERRUPTED],
                },
            },
        ]
    }


def _job_set(config: RunConfig, name: str, pod: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of a JobSet, which replaces all pods after a failure."""
    job = _job(config, name, pod)
    job["template"]["spec"].pop("subdomain", None)  # the JobSet has its own Service
    return {
        "failurePolicy": {
            "maxRestarts": _replacements(config),
            "rules": [
                {
                    "name": "runFailed",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {"name": CONTAINER, "replicas": 1, "template": {"spec": {**job, "backoffLimit": 0}}}
        ],
    }


def _train_job(config: RunConfig, name: str, pod: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of a TrainJob. Its runtime has the failure policy."""
    (container,) = pod["containers"]
    of_runtime = (
        "containers",
        "priorityClassName",
        "automountServiceAccountToken",
        "enableServiceLinks",
    )
    patched = {key: value for key, value in pod.items() if key not in of_runtime}
    kept = ("volumeMounts", "securityContext")
    patched["containers"] = [{"name": CONTAINER, **{key: container[key] for key in kept}}]
    template = {"metadata": {"labels": _labels(name)}, "spec": patched}
    job = {"name": CONTAINER, "template": {"spec": {"template": template}}}
    return {
        "runtimeRef": {"name": config.launch.kubernetes.runtime},
        "trainer": {
            "image": container["image"],
            "command": container["command"],
            "numNodes": int(config.launch.nnodes),
            "numProcPerNode": config.launch.nproc,
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {
                "manager": "axonlaunch/launcher",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
            }
        ],
    }
