"""Checks, prints or submits a run on Kubernetes, and follows it to its end.

check -> RunObjects -> schema, rules and the server's dry run -> Secret, ConfigMap, ... -> job
"""

from __future__ import annotations

import secrets
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.problems.errors import TRANSIENT, exit_status, gathering
from axonlaunch.launch.environment.environment_variables import POD_SUBMISSION
from axonlaunch.launch.external.followed_job import follow_job, shared_folder
from axonlaunch.launch.external.kubernetes.checks import (
    read_patch,
    rule_problems,
    setting_issues,
    with_folder_of_pods,
)
from axonlaunch.launch.external.kubernetes.cluster import Cluster, RefusedError, UnreachableError
from axonlaunch.launch.external.kubernetes.cluster_job import ClusterJob, cluster_jobs, retry
from axonlaunch.launch.external.kubernetes.manifests import RunObjects, build_objects
from axonlaunch.launch.external.kubernetes.resources import pod_resources
from axonlaunch.launch.launcher import LaunchOptions, check_anywhere
from axonlaunch.system.text.yaml_blocks import to_block_yaml

_SUBMISSION = "axonlaunch/submission"
"""Annotation of objects with a random text of the command that created them."""
_EXISTS = 409
"""HTTP status."""
_GONE_S, _POLL_S = 60.0, 1.0
"""Seconds in which a deleted job and its objects must be gone, and between looks for them."""


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Run the checks that apply to every node, and those of the settings of the cluster.

    Raises:
        ConfigError: No node can run the configuration, or a setting that a job needs is missing.
    """
    issues = setting_issues(config)
    if not issues:
        with gathering(issues):
            config = with_folder_of_pods(config)
        with gathering(issues):
            read_patch(config.launch.kubernetes)
        with gathering(issues):
            config = check_anywhere(config, options)
    if issues:
        raise ConfigError(issues)
    return config


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any] | None]:
    """Submit a run and follow it to its end, or print its objects.

    Args:
        config: Configuration returned by ``check``.
        options: Options of the launch.

    Returns:
        The exit status and the name, namespace, run folder and last state of the job; None instead
        of the latter if its objects were printed.

    Raises:
        ConfigError: The objects are not valid, or the server refuses them.
    """
    if options.render:
        # A sweep prints several.
        print("---", to_text(_objects(config, options)), sep="\n", end="")
        return 0, None
    cluster = Cluster.of(config.launch.kubernetes)  # before the estimate, which takes time
    objects = _objects(config, options)
    output = sys.stderr if options.as_json else sys.stdout
    return submit_objects(config, objects, cluster, announce=lambda text: print(text, file=output))


def _objects(config: RunConfig, options: LaunchOptions) -> RunObjects:
    """Return the objects of a run, checked against the schema and the rules of Kubernetes.

    Raises:
        ConfigError: The patch makes an object that is not valid.
    """
    choices = config.launch.kubernetes
    patch = read_patch(choices)
    objects = build_objects(config, pod_resources(config, options.fork_server), patch)
    if patch is None:
        return objects
    try:
        from axonlaunch.launch.external.kubernetes.schema import schema_problems

        problems = schema_problems(objects.job, choices.kind)
    except ImportError:
        problems = ["is checked by the package kubernetes: pip install 'axonlaunch[kubernetes]'"]
    # The rules read an object that follows the schema.
    problems = problems or rule_problems(objects.job, choices.kind, objects.name)
    key = "launch.kubernetes.patch"
    if problems:
        raise ConfigError([ConfigIssue(key, problem, choices.patch) for problem in problems])
    return objects


def to_text(objects: RunObjects) -> str:
    """Return the objects as YAML for ``kubectl apply``, without the Secret."""
    header = ""
    if objects.secret:
        namespace = objects.job["metadata"].get("namespace")
        header = (
            "# Create the token that the nodes share first, once:\n"
            f"# kubectl create secret generic {objects.secret} "
            f"{f'--namespace={namespace} ' if namespace else ''}"
            '--from-literal=token="$(openssl rand -hex 32)"\n'
        )
    texts = [to_block_yaml(each) for each in [*objects.others, objects.job]]
    return header + "---\n".join(texts)


def submit_objects(
    config: RunConfig, objects: RunObjects, cluster: Cluster, *, announce: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    """Create the objects of a run and follow it. Ctrl-C stops following and does not end it.

    Args:
        config: Checked configuration.
        objects: Objects of the run.
        cluster: The API server.
        announce: Receives lines for the user.

    Returns:
        The exit status, and the name, namespace, run folder and last state of the job.

    Raises:
        ConfigError: The server does not answer or refuses an object. Nothing is left behind.
    """
    create_all(objects, cluster, str(config.name))
    name, kind = objects.name, objects.job["kind"]
    announce(
        f"{kind} {name} submitted to {cluster.namespace} at {cluster.server}; axonlaunch stop "
        f"{name} stops it, Ctrl-C here only stops following it"
    )
    status, state = follow_job(ClusterJob.of_object(cluster, objects.job), announce)
    about = {"name": name, "namespace": cluster.namespace, "run_dir": config.run_dir}
    return status, {**about, "state": state}


def create_all(objects: RunObjects, cluster: Cluster, name: str) -> None:
    """Create the objects of a run; the server checks all of them before the first is created.

    The others are created before the job and belong to it, so that they are deleted with it.

    Raises:
        ConfigError: The server does not answer or refuses an object. Nothing is left behind, or the
            error names it.
    """
    others = list(objects.others)
    if objects.secret:
        others.insert(0, _secret(objects))
    submission = secrets.token_hex(8)
    *others, job = [_with_submission(each, submission) for each in [*others, objects.job]]
    retry(partial(_check, [*others, job], cluster), cluster, name)
    _refuse_shared_folder(job, cluster, name)
    created: list[dict[str, Any]] = []
    try:
        for each in [*others, job]:
            created.append(each)  # the server may have made it even if no answer arrives
            try:
                reply = retry(partial(cluster.create, each), cluster, name)
            except ConfigError as error:
                if exit_status(error.problems) != TRANSIENT:
                    created.pop()  # refused: an object of this name is another's
                raise
            created[-1] = reply
        about = {key: reply[key] for key in ("apiVersion", "kind")}
        owner = {**about, "name": objects.name, "uid": reply["metadata"]["uid"]}
        for each in others:
            change = {"metadata": {"ownerReferences": [owner]}}
            request = partial(cluster.patch, each["kind"], each["metadata"]["name"], change)
            retry(request, cluster, name)
    except BaseException as error:
        left = _delete_all(created, cluster, submission)
        if left and isinstance(error, ConfigError):
            message = f"these may be left: kubectl delete --namespace={cluster.namespace} {left}"
            raise ConfigError(
                [*error.problems, ConfigIssue("", message, is_transient=True)]
            ) from None
        raise


def _check(wanted: list[dict[str, Any]], cluster: Cluster) -> None:
    """Let the server check objects; an earlier job of the run that has ended is deleted for them.

    Args:
        wanted: The objects, the job last.
        cluster: The API server.

    Raises:
        RefusedError: The server refuses an object.
        UnreachableError: The server does not answer.
        ConfigError: The state of the earlier job can't be read.
    """
    deadline = None
    while taken := [refused for each in wanted if (refused := _name_taken(each, cluster))]:
        if deadline is None and _delete_ended(wanted[-1], cluster):
            deadline = time.monotonic() + _GONE_S
        if deadline is None or time.monotonic() > deadline:
            raise taken[0]
        time.sleep(_POLL_S)


def _name_taken(each: dict[str, Any], cluster: Cluster) -> RefusedError | None:
    """Let the server check an object; return the refusal if there is one of its name.

    Raises:
        RefusedError: The server refuses the object for another reason.
        UnreachableError: The server does not answer.
    """
    try:
        cluster.create(each, dry=True)
    except RefusedError as refused:
        if refused.status == _EXISTS:
            return refused
        raise
    return None


def _delete_ended(job: dict[str, Any], cluster: Cluster) -> bool:
    """Delete an earlier job of a run, with the objects that belong to it, if it has ended.

    Returns:
        Whether there was one with the run's name and folder.

    Raises:
        RefusedError: The server does not allow it.
        UnreachableError: The server does not answer.
        ConfigError: The state of the earlier job can't be read.
    """
    found = cluster.get(job["kind"], job["metadata"]["name"])
    if found is None:
        return False
    earlier = ClusterJob.of_object(cluster, {**found, "kind": job["kind"]})
    if earlier.run_dir != ClusterJob.of_object(cluster, job).run_dir or not earlier.has_ended():
        return False
    cluster.delete(job["kind"], earlier.name, found["metadata"]["uid"])
    return True


def _with_submission(each: dict[str, Any], submission: str) -> dict[str, Any]:
    """Return an object with the annotation of the command that creates it; pods can read it."""
    metadata = each["metadata"]
    annotations = {**(metadata.get("annotations") or {}), _SUBMISSION: submission}
    marked = {**each, "metadata": {**metadata, "annotations": annotations}}
    if each["kind"] == "ConfigMap":
        marked["data"] = {**each["data"], PurePosixPath(POD_SUBMISSION).name: submission}
    return marked


def _delete_all(created: list[dict[str, Any]], cluster: Cluster, submission: str) -> str:
    """Delete objects, the last first; return those that can't be deleted, as for kubectl.

    Args:
        created: Answers of the server; the object itself if no answer has arrived.
        cluster: The API server.
        submission: Annotation of the objects of this command. Another one may have created an
            object of this name since.
    """
    left = []
    for each in reversed(created):
        kind, name = each["kind"], each["metadata"]["name"]
        try:
            existing = each if "uid" in each["metadata"] else cluster.get(kind, name)
            if (
                existing is None
                or existing["metadata"].get("annotations", {}).get(_SUBMISSION) != submission
            ):
                continue
            cluster.delete(kind, name, existing["metadata"]["uid"])
        except RefusedError as refused:
            if refused.status != 404:
                left.append(f"{kind.lower()}/{name}")
        except UnreachableError:
            left.append(f"{kind.lower()}/{name}")
    return " ".join(left)


def _refuse_shared_folder(job: dict[str, Any], cluster: Cluster, name: str) -> None:
    """Refuse a run whose run folder, or folder of checkpoints, another job of the namespace uses.

    Raises:
        ConfigError: A job that has not ended uses a folder.
    """
    submitted = ClusterJob.of_object(cluster, job)
    for other in retry(partial(cluster_jobs, cluster), cluster, name):
        shared = shared_folder(submitted, other)
        if shared is not None and not other.has_ended():
            key, folder = shared
            message = f"{other.title} uses it; stop and delete that one, or choose another"
            raise ConfigError([ConfigIssue(key, message, folder)])


def _secret(objects: RunObjects) -> dict[str, Any]:
    """Return the Secret with a random token, which the nodes of the run share."""
    token = b64encode(secrets.token_hex(32).encode()).decode()
    metadata = {**objects.others[0]["metadata"], "name": objects.secret}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "data": {"token": token},
    }
