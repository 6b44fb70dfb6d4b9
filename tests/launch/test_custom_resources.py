"""Stored manifests, checked with the definitions and CEL rules of JobSets and TrainJobs.

Offline with the schema of the definitions in this folder, and by a real API server that has them
(scripts/kube-up).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.launchers import kubernetes

from axonlaunch.config import ConfigError
from axonlaunch.launch.external.kubernetes import checks, schema
from axonlaunch.launch.external.kubernetes.cluster import Cluster
from axonlaunch.launch.external.kubernetes.cluster_job import ClusterJob, retry
from axonlaunch.launch.external.kubernetes.custom_kinds import CUSTOM_KINDS
from axonlaunch.launch.external.kubernetes.manifests import merge_patch
from axonlaunch.training.loggers.logger import RunInfo
from axonlaunch.training.loggers.trainjob import TrainJobLogger

DEFINITIONS = Path(__file__).with_name("definitions")
MANIFESTS = Path(__file__).with_name("manifests")
KINDS = {"jobset": "JobSet", "trainjob": "TrainJob"}
_TYPES = {"str": "string", "int": "integer", "bool": "boolean", "datetime": "string"}

BREAKS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "jobset",
        {"spec": {"replicatedJobz": []}},
        "spec.replicatedJobz: there is no such key; did you mean replicatedJobs?",
        'unknown field "spec.replicatedJobz"',
    ),
    (
        "jobset",
        {
            "spec": {
                "startupPolicy": {"startupPolicyOrder": "InOrder"},
                "replicatedJobs": [
                    {"name": "node", "dependsOn": [{"name": "data", "status": "Ready"}]}
                ],
            }
        },
        "sets startupPolicyOrder=InOrder and dependsOn, of which a JobSet can have only one",
        "StartupPolicy and DependsOn APIs are mutually exclusive",
    ),
    (
        "jobset",
        {"spec": {"volumeClaimPolicies": [{"templates": [{"metadata": {"namespace": "lab"}}]}]}},
        "sets a namespace in volumeClaimPolicies, whose claims are in that of the JobSet",
        "namespace cannot be set for VolumeClaimPolicies templates",
    ),
    (
        "trainjob",
        {"spec": {"trainer": {"numNodes": "four"}}},
        "spec.trainer.numNodes='four': expected int",
        "refuses spec.trainer.numNodes: ",
    ),
    (
        "trainjob",
        {"spec": {"managedBy": "me"}},
        "sets managedBy=me; use trainer.kubeflow.org/trainjob-controller or "
        "kueue.x-k8s.io/multikueue",
        "ManagedBy must be trainer.kubeflow.org/trainjob-controller or "
        "kueue.x-k8s.io/multikueue if set",
    ),
    (
        "trainjob",
        {"spec": {"initializer": {"model": {"storageUri": "/models/7b"}}}},
        "sets initializer.model.storageUri=/models/7b; write SCHEME://PATH",
        "storageUri may be empty, or it must be a valid URI (scheme://...)",
    ),
    (
        "trainjob",
        {"metadata": {"name": "1abc"}},
        "changes metadata.name; write name=... for the run instead of big",
        "metadata.name must match RFC 1035 DNS label format",
    ),
    (
        "trainjob",
        {"metadata": {"name": "a" * 64}},
        "changes metadata.name; write name=... for the run instead of big",
        "metadata.name must be no more than 63 characters",
    ),
]
"""Patches of an object, with the problem that is found offline and the server's refusal."""
IDS = [refusal for *_, refusal in BREAKS]


def definition(kind: str) -> dict[str, Any]:
    """Return the schema of a kind with its CEL rules."""
    text = (DEFINITIONS / f"{kind}.yaml").read_text()
    (version,) = yaml.load(text, yaml.CSafeLoader)["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def documents(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a stored manifest, without their namespace."""
    objects = [each for each in yaml.safe_load_all(file.read_text()) if each]
    for each in objects:
        each["metadata"].pop("namespace", None)
    return objects


def stored(kind: str, name: str = "big") -> dict[str, Any]:
    """Return the JobSet or TrainJob of a stored manifest, as that of another run if it is named."""
    job = documents(MANIFESTS / f"{kind}.yaml")[-1]
    job["metadata"]["name"] = name
    return job


def unlike(kind: str, defined: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of keys and types of ``CUSTOM_KINDS`` that are not those of a definition."""
    if kind.startswith("list["):
        yield from unlike(kind[5:-1], defined.get("items", {}), f"{path}[]")
    elif kind in CUSTOM_KINDS:
        keys, found = CUSTOM_KINDS[kind], defined.get("properties", {})
        yield from (
            f"{path}.{key}" for key in keys.keys() ^ found.keys() if path or key != "status"
        )
        for key in keys.keys() & found.keys():
            yield from unlike(keys[key], found[key], f"{path}.{key}")
    elif _TYPES.get(kind, "object") != defined.get("type"):
        yield f"{path}: {kind}"


def strict(defined: Any) -> Any:
    """Return a schema that refuses the keys which it does not name."""
    if not isinstance(defined, dict):
        return defined
    closed = {key: strict(value) for key, value in defined.items() if key != "properties"}
    if "properties" in defined:
        keys = {key: strict(value) for key, value in defined["properties"].items()}
        closed |= {"properties": keys, "additionalProperties": False}
    return closed


def rules(defined: Any) -> Iterator[str]:
    """Yield the messages of the CEL rules for new objects."""
    if isinstance(defined, dict):
        for rule in defined.get("x-kubernetes-validations", []):
            if "oldSelf" not in rule["rule"]:
                yield rule["message"]
        for value in defined.values():
            yield from rules(value)


@pytest.mark.parametrize("kind", KINDS)
def test_table_of_keys_and_types_is_that_of_the_definition(kind: str) -> None:
    assert [*unlike(KINDS[kind], definition(kind), "")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_stored_manifest_follows_the_strict_schema_of_its_definition(kind: str) -> None:
    validator = jsonschema.Draft7Validator(strict(definition(kind)))
    job = stored(kind)
    assert [error.message for error in validator.iter_errors(job)] == []
    job["spec"]["suspended"] = True
    (error,) = validator.iter_errors(job)
    assert "'suspended' was unexpected" in error.message


@pytest.mark.parametrize("kind", KINDS)
def test_each_rule_of_a_definition_is_broken_by_a_case(kind: str) -> None:
    spec = definition(kind)["properties"]["spec"]
    expected = {*rules(spec), *rules({**definition(kind), "properties": {}})}
    assert expected <= {refusal for of_kind, _, _, refusal in BREAKS if of_kind == kind}


@pytest.mark.parametrize(("kind", "patch", "problem", "refusal"), BREAKS, ids=IDS)
def test_patch_that_breaks_a_rule_is_refused_offline(
    kind: str, patch: dict[str, Any], problem: str, refusal: str
) -> None:
    job = merge_patch(stored(kind), patch)
    problems = schema.schema_problems(job, kind) or checks.rule_problems(job, kind, "big")
    assert problems == [problem]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a cluster that has JobSets and TrainJobs, without their controllers."""
    with kubernetes(tmp_path_factory.mktemp("kube"), DEFINITIONS) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("manifest", sorted(file.stem for file in MANIFESTS.glob("*.yaml")))
def test_real_server_accepts_a_stored_manifest(manifest: str, api: Cluster) -> None:
    for each in documents(MANIFESTS / f"{manifest}.yaml"):
        made = api.create(each, dry=True)
        if each["kind"] in KINDS.values():  # the server of Jobs is older than some of their keys
            assert merge_patch(made["spec"], each["spec"]) == made["spec"]  # the rest are defaults
            assert manifest in api.known_kinds()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "patch", "problem", "refusal"), BREAKS, ids=IDS)
def test_real_server_refuses_an_object_that_breaks_a_rule(
    kind: str, patch: dict[str, Any], problem: str, refusal: str, api: Cluster
) -> None:
    job = merge_patch(stored(kind), patch)
    with pytest.raises(ConfigError) as refused:
        retry(lambda: api.create(job, dry=True), api, "big")
    assert refusal in str(refused.value)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_custom_job_is_suspended_and_resumed_on_a_real_server(kind: str, api: Cluster) -> None:
    name = f"paused-{kind}"
    made = api.create(stored(kind, name))
    # Without a queue: there is no Kueue here.
    api.patch(made["kind"], name, {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}})
    job = ClusterJob(api, made["kind"], name, "/runs/big", nproc=8)
    for is_suspended, said in ((True, "is suspended"), (False, "resumes")):
        assert said in (job.stop() if is_suspended else job.resume())
        now = api.get(made["kind"], name)
        assert now is not None
        assert now["spec"]["suspend"] is is_suspended


@pytest.mark.slow
@pytest.mark.processes
def test_progress_fits_the_status_of_a_trainjob_on_a_real_server(
    api: Cluster, cluster: Path, tmp_path: Path
) -> None:
    api.create(stored("trainjob", "reported"))
    certificate = cluster / "certs" / "apiserver.crt"
    values = {"URL": "https://trainer", "CA_CERT": str(certificate), "TOKEN": str(tmp_path)}
    logger = TrainJobLogger({f"KUBEFLOW_TRAINER_SERVER_{k}": v for k, v in values.items()})
    logger.start(RunInfo(name="reported", run_dir=tmp_path, config={"train": {"steps": 200}}))
    logger._metrics, logger._step = {"loss": 2.5, "step_s": 0.5, "perplexity": float("inf")}, 50
    path = f"{api.path('TrainJob', 'reported')}/status"
    change = {"status": {"trainerStatus": logger.status()}}
    made = api._json("PATCH", path, "change the status of a TrainJob", {}, change)
    assert made["status"]["trainerStatus"]["progressPercentage"] == 25
    assert made["status"]["trainerStatus"]["estimatedRemainingSeconds"] == 75
