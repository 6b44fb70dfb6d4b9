"""Checks the settings of a run on Kubernetes that need no cluster, and resolves its run folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.launch import KubernetesConfig
from axonlaunch.config.values.plain_values import LARGEST_YAML, read_yaml
from axonlaunch.config.values.url import is_url
from axonlaunch.launch.external.kubernetes.manifests import CONTAINER, run_name
from axonlaunch.launch.external.kubernetes.names import (
    Volume,
    is_label_key,
    is_label_value,
    is_object_name,
    is_quantity,
    toleration,
)
from axonlaunch.launch.launcher import RESOLVED_SETTINGS, submission_issues
from axonlaunch.launch.run_folder.names import SCRATCH_FOLDER, with_folder_of_nodes
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.storage.home import expand_home

_KEY = "launch.kubernetes"
_RESERVED = "PET_"
"""Prefix of the variables that Kubeflow Trainer sets, and refuses in a TrainJob."""

_MANAGERS = ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")
"""Values that Kubeflow Trainer accepts for ``managedBy``."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")


def setting_issues(config: RunConfig) -> list[ConfigIssue]:
    """Return the problems of the settings of a run on Kubernetes."""
    return [*_job_issues(config), *_option_issues(config.launch.kubernetes)]


def _job_issues(config: RunConfig) -> Iterator[ConfigIssue]:
    resume = config.checkpoint.resume
    yield from submission_issues(
        config.launch,
        target="job",
        run="a job",
        node="pod",
        origin="the job sets it in each pod",
        resolved=[
            key
            for key in RESOLVED_SETTINGS
            if key != "master_port" or config.launch.kubernetes.kind == "trainjob"
        ],
    )
    if resume == "never":
        message = "a pod that is replaced could not resume; use auto, and another name to start new"
        yield ConfigIssue("checkpoint.resume", message, resume)
    if config.checkpoint.overwrite:
        message = "a pod that is replaced would start over; use another name"
        yield ConfigIssue("checkpoint.overwrite", message, True)


def _option_issues(options: KubernetesConfig) -> Iterator[ConfigIssue]:
    if not options.image:
        message = "is required: an image with axonlaunch installed (axonlaunch help launchers)"
        yield ConfigIssue(f"{_KEY}.image", message)
    elif any(character.isspace() for character in options.image):
        yield ConfigIssue(f"{_KEY}.image", "has blanks; write REGISTRY/NAME:TAG", options.image)
    for key in ("namespace", "queue", "priority_class", "service_account"):
        value = getattr(options, key)
        if value is not None and not is_object_name(value):
            message = (
                "is not a valid name in Kubernetes: a-z, digits, - and ., between letters or digits"
            )
            yield ConfigIssue(f"{_KEY}.{key}", message, value)
    for secret in options.secrets:
        if not is_object_name(secret):
            message = "names no Secret: a-z, digits, - and ., between letters or digits"
            yield ConfigIssue(f"{_KEY}.secrets", message, secret)
    for name, value in options.node_selector.items():
        if not is_label_key(name) or not is_label_value(str(value)):
            message = "is no label: write {KEY: VALUE}, as kubectl get nodes --show-labels shows"
            yield ConfigIssue(f"{_KEY}.node_selector", message, f"{name}: {value}")
    yield from _parse_issues(f"{_KEY}.tolerations", options.tolerations, toleration)
    yield from _parse_issues(f"{_KEY}.volumes", options.volumes, Volume.parse)
    if not is_label_key(options.gpu):
        message = "is no resource; write one as nvidia.com/gpu or amd.com/gpu"
        yield ConfigIssue(f"{_KEY}.gpu", message, options.gpu)
    if options.memory != "auto" and not is_quantity(options.memory):
        message = "is no quantity of memory; write one as 200Gi, or auto"
        yield ConfigIssue(f"{_KEY}.memory", message, options.memory)
    if options.kind == "trainjob":
        for key in ("secrets", "priority_class"):
            if value := getattr(options, key):
                message = "a TrainJob can't have it; set it in the runtime, or use kind=jobset"
                yield ConfigIssue(f"{_KEY}.{key}", message, value)


def _parse_issues(
    key: str, texts: list[str], parse: Callable[[str], object]
) -> Iterator[ConfigIssue]:
    for text in texts:
        try:
            parse(text)
        except ValueError as error:
            yield ConfigIssue(key, str(error))


def with_folder_of_pods(config: RunConfig) -> RunConfig:
    """Resolve ``name`` and ``run_dir`` as the pods see them.

    Raises:
        ConfigError: No volume keeps the run folder or the checkpoints, or the name is not legal.
    """
    requested, checkpoints = config.run_dir, config.checkpoint.path
    volumes = [Volume.parse(text) for text in config.launch.kubernetes.volumes]
    writable = [volume for volume in volumes if not volume.read_only]
    root = writable[0].path if writable else SCRATCH_FOLDER
    config = with_folder_of_nodes(config, root=root)
    issues = []
    if not is_url(checkpoints or ""):
        kept = {"run_dir": (config.run_dir, requested)}
        if checkpoints is not None:
            kept["checkpoint.path"] = (checkpoints, checkpoints)
        message = (
            "the disk of a pod ends with it; mount a claim that all pods can write, as "
            "launch.kubernetes.volumes=[runs:/runs], or save to a bucket, as "
            "checkpoint.path=s3://bucket/run"
        )
        issues += [
            ConfigIssue(key, message, written)
            for key, (folder, written) in kept.items()
            if not any(volume.holds(folder) for volume in writable)
        ]
    try:
        run_name(config)
    except ValueError as error:
        issues.append(ConfigIssue("name", str(error), config.name))
    if issues:
        raise ConfigError(issues)
    return config


def read_patch(options: KubernetesConfig) -> dict[str, Any] | None:
    """Return the content of the file that is merged into the object; None without one.

    Raises:
        ConfigError: The file can't be read, or changes what axonlaunch relies on.
    """
    if options.patch is None:
        return None
    key, path = f"{_KEY}.patch", options.patch
    try:
        patch = read_yaml(read_text(expand_home(path), at_most=LARGEST_YAML))
    except OSError as error:
        raise ConfigError([ConfigIssue(key, f"can't be read: {error.strerror}", path)]) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError([ConfigIssue(key, f"is no YAML of one object: {reason}", path)]) from None
    return patch


def rule_problems(job: dict[str, Any], kind: str, name: str) -> list[str]:
    """Return the problems of a patched object that no schema finds, CEL rules included.

    Args:
        job: Job, JobSet or TrainJob that follows the schema.
        kind: Value of ``launch.kubernetes.kind``.
        name: Name of the run's objects.
    """
    problems = []
    if job.get("metadata", {}).get("name") != name:
        problems.append(f"changes metadata.name; write name=... for the run instead of {name}")
    pod = (pod_template(job, kind) or {}).get("spec") or {}
    if CONTAINER not in [container.get("name") for container in pod.get("containers") or []]:
        problems.append(f"removes the container {CONTAINER}, which trains")
    if kind != "trainjob" and pod.get("restartPolicy") != "Never":
        problems.append("changes restartPolicy; the failure policy needs Never")
    if kind == "jobset":
        problems += _job_set_problems(job["spec"])
    elif kind == "trainjob":
        problems += _train_job_problems(job["spec"])
    return problems


def _job_set_problems(spec: dict[str, Any]) -> Iterator[str]:
    in_order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder"
    if in_order and any("dependsOn" in job for job in spec.get("replicatedJobs") or []):
        yield "sets startupPolicyOrder=InOrder and dependsOn, of which a JobSet can have only one"
    policies = spec.get("volumeClaimPolicies") or []
    claims = [claim for policy in policies for claim in policy.get("templates") or []]
    if any((claim.get("metadata") or {}).get("namespace") for claim in claims):
        yield "sets a namespace in volumeClaimPolicies, whose claims are in that of the JobSet"


def _train_job_problems(spec: dict[str, Any]) -> Iterator[str]:
    trainer, manager = spec.get("trainer") or {}, spec.get("managedBy")
    names = [str(variable.get("name", "")) for variable in trainer.get("env") or []]
    if reserved := [each for each in names if each.startswith(_RESERVED)]:
        yield f"sets {', '.join(reserved)}, which Kubeflow Trainer sets itself"
    if (count := trainer.get("numProcPerNode", 1)) < 1:
        yield f"sets numProcPerNode={count}; it must be at least 1"
    if manager is not None and manager not in _MANAGERS:
        yield f"sets managedBy={manager}; use {' or '.join(_MANAGERS)}"
    for source, settings in (spec.get("initializer") or {}).items():
        uri = (settings or {}).get("storageUri")
        if uri and not _URI.fullmatch(str(uri)):
            yield f"sets initializer.{source}.storageUri={uri}; write SCHEME://PATH"


def pod_template(job: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the template of the pods in an object; None if a patch has removed it."""
    paths: dict[str, tuple[str | int, ...]] = {
        "job": ("spec", "template"),
        "jobset": ("spec", "replicatedJobs", 0, "template", "spec", "template"),
        "trainjob": (
            *("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec"),
            *("replicatedJobs", 0, "template", "spec", "template"),
        ),
    }
    found: Any = job
    for step in paths[kind]:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            return None
    return found if isinstance(found, dict) else None
