"""Sends requests to the API server of a kubeconfig, and turns its refusals into errors of keys.

Needs the Python package ``kubernetes`` (the extra of the same name).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.options.launch import KubernetesConfig

_READ_S, _CHANGE_S = 10.0, 30.0
"""Timeouts of requests in seconds. A follower repeats those that only read, and reports it."""
_LEAST_ERROR, _TOO_MANY, _SERVER_ERROR = 400, 429, 500
"""HTTP statuses."""
MANAGER = "axonlaunch"
"""Name under which the server notes the fields that axonlaunch has set."""
KEYS = {
    "Job": "job",
    "JobSet": "jobset",
    "TrainJob": "trainjob",
}
"""Values of ``launch.kubernetes.kind`` by kind of object."""
_FOLDERS = {
    "Job": "apis/batch/v1",
    "JobSet": "apis/jobset.x-k8s.io/v1alpha2",
    "TrainJob": "apis/trainer.kubeflow.org/v1alpha1",
}
"""Paths of the API groups of kinds; all others are in the core group, except those of Kueue."""
_KUEUE = "apis/kueue.x-k8s.io"
_TRAINER = "2.3 or later"
_NEW_IN_TRAINER = re.compile(r'unknown field "[^"]*(runtimePatches|terminationGracePeriodSeconds)"')
"""Refusal of a TrainJob by an older version: 2.1 has no patches, 2.2 no grace period in them."""


class UnreachableError(Exception):
    """The API server does not answer; a later request may succeed."""


@dataclass
class RefusedError(Exception):
    """The API server refused a request.

    Attributes:
        status: HTTP status.
        content: Content of the answer: a ``Status`` of Kubernetes, or plain text as ``message``.
        action: Requested action, for a message.
        kind: Kind of the object.
    """

    status: int
    content: dict[str, Any]
    action: str
    kind: str

    @property
    def message(self) -> str:
        """Message of the server on one line."""
        return " ".join(str(self.content.get("message", "")).split())

    @property
    def is_unknown_kind(self) -> bool:
        """Whether the server has no API of this kind of job."""
        return self.status == 404 and "details" not in self.content and bool(self.kind)


class Cluster:
    """The API server and namespace of a kubeconfig's context.

    Attributes:
        namespace: Namespace of all requests.
        context: Name of the context; empty in a pod.
        server: Address of the API server.
    """

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        """Read the kubeconfig, or the service account if this process is in a pod.

        Raises:
            ConfigError: The package ``kubernetes`` is not installed, or there is no such context.
        """
        import yaml

        try:
            from kubernetes import client, config
        except ImportError:
            message = "needs the package kubernetes: pip install 'axonlaunch[kubernetes]'"
            raise ConfigError([ConfigIssue("launch.name", message, "kubernetes")]) from None
        settings = client.Configuration()
        # The package reads the variable only once, when it is imported.
        files = os.environ.get("KUBECONFIG") or config.KUBE_CONFIG_DEFAULT_LOCATION
        self.context, default_namespace = "", "default"
        try:
            contexts, current = config.list_kube_config_contexts(files)
            chosen = current if context is None else _find_context(contexts, context)
            self.context = chosen["name"]
            default_namespace = chosen["context"].get("namespace") or "default"
            config.load_kube_config(files, context=self.context, client_configuration=settings)
        except config.ConfigException as error:
            default_namespace = _in_pod(settings, error, context)
        except ConfigError:
            raise
        except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            message = f"the kubeconfig can't be read ({reason}); kubectl config view shows it"
            raise ConfigError([ConfigIssue("launch.kubernetes.context", message)]) from None
        self.namespace = namespace or default_namespace
        self.server = str(settings.host).rstrip("/")
        self._settings = settings
        # Its connections have the certificates and the proxy of the kubeconfig.
        self._pool = client.ApiClient(settings).rest_client.pool_manager

    @classmethod
    def of(cls, options: KubernetesConfig) -> Cluster:
        """Return the cluster of a configuration.

        Raises:
            ConfigError: There is no kubeconfig, or no such context.
        """
        return cls(options.context, options.namespace)

    def path(self, kind: str, name: str = "") -> str:
        """Return the path of an object of this namespace, or of all objects of a kind."""
        folder = self._kueue if kind == "Workload" else _FOLDERS.get(kind, "api/v1")
        plural = f"{kind.lower()}s"
        return f"/{folder}/namespaces/{self.namespace}/{plural}{f'/{name}' if name else ''}"

    @cached_property
    def _kueue(self) -> str:
        """Path of Kueue's API group in the version that the server prefers; 0.20 has no v1beta1."""
        group = self._json("GET", f"/{_KUEUE}", "look for Kueue")
        return f"apis/{group['preferredVersion']['groupVersion']}"

    @property
    def has_kueue(self) -> bool:
        """Whether the server has Kueue."""
        try:
            return bool(self._kueue)
        except RefusedError as refused:
            if refused.status == 404:
                return False
            raise

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if the server says that it does not exist."""
        try:
            return self._json("GET", self.path(kind, name), f"get the {kind} {name}")
        except RefusedError as refused:
            # A proxy, or a server that does not serve the kind yet, names no object.
            if refused.status == 404 and "details" in refused.content:
                return None
            raise

    def find(self, kind: str, labels: str) -> list[dict[str, Any]]:
        """Return the objects with these labels."""
        query = {"labelSelector": labels}
        listed = self._json("GET", self.path(kind), f"list {kind}s", query)
        items: list[dict[str, Any]] = listed["items"]
        return items

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of the objects with this name, the latest last."""
        query = {"fieldSelector": f"involvedObject.name={name}"}
        listed = self._json("GET", self.path("Event"), "list events", query)["items"]
        return sorted(
            listed, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime"))
        )

    def create(self, body: dict[str, Any], *, dry: bool = False) -> dict[str, Any]:
        """Create an object; unknown fields are refused by servers since 1.27.

        Args:
            dry: Whether the server only checks it.
        """
        query = {"fieldValidation": "Strict", "fieldManager": MANAGER}
        if dry:
            query["dryRun"] = "All"
        kind, name = body["kind"], body["metadata"]["name"]
        return self._json("POST", self.path(kind), f"create the {kind} {name}", query, body)

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> dict[str, Any]:
        """Merge a change into an object."""
        action = f"change the {kind} {name}"
        query = {"fieldManager": MANAGER}
        return self._json("PATCH", self.path(kind, name), action, query, change)

    def delete(self, kind: str, name: str, uid: str = "") -> None:
        """Delete an object after everything that belongs to it.

        Args:
            kind: Kind of the object.
            name: Name of the object.
            uid: Identifier of the object, without which the server deletes any of this name.
        """
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        body["propagationPolicy"] = "Foreground"
        if uid:
            body["preconditions"] = {"uid": uid}
        self._json("DELETE", self.path(kind, name), f"delete the {kind} {name}", {}, body)

    def log(self, pod: str, container: str, *, since: str = "") -> str:
        """Return the log of a pod, each line with its time.

        Args:
            pod: Name of the pod.
            container: Name of its container.
            since: Time from which lines are returned, to the second; empty: all lines.
        """
        query = {"container": container, "timestamps": "true"}
        if since:
            query["sinceTime"] = since
        answer = self._send("GET", f"{self.path('Pod', pod)}/log", f"read the log of {pod}", query)
        return answer.decode(errors="replace")

    def known_kinds(self) -> list[str]:
        """Return the values of ``launch.kubernetes.kind`` that this server knows."""
        kinds = []
        for kind, key in KEYS.items():
            try:
                self._json("GET", f"/{_FOLDERS[kind]}", f"look for {kind}s")
            except (RefusedError, UnreachableError):
                continue
            kinds.append(key)
        return kinds

    def _json(
        self,
        method: str,
        path: str,
        action: str,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._send(method, path, action, query, body))
        return content

    def _send(
        self,
        method: str,
        path: str,
        action: str,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> bytes:
        from urllib3.exceptions import HTTPError

        suffix = f"?{urlencode(query)}" if query else ""
        content_type = "merge-patch+json" if method == "PATCH" else "json"
        headers = {"Accept": "*/*", "Content-Type": f"application/{content_type}"}
        for credential in self._settings.auth_settings().values():
            headers[credential["key"]] = credential["value"]
        try:
            answer = self._pool.request(
                method,
                f"{self.server}{path}{suffix}",
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=_READ_S if method == "GET" else _CHANGE_S,
                retries=False,
            )
        except HTTPError as error:
            raise UnreachableError(_short(str(getattr(error, "reason", None) or error))) from None
        if answer.status >= _SERVER_ERROR or answer.status == _TOO_MANY:
            raise UnreachableError(f"HTTP status {answer.status}")
        if answer.status >= _LEAST_ERROR:
            kinds = sorted(KEYS, key=len, reverse=True)  # the others contain Job
            kind = next((kind for kind in kinds if kind in action), "")
            raise RefusedError(answer.status, _content(answer.data), action, kind)
        data: bytes = answer.data
        return data

    def to_issue(self, refused: RefusedError, config_name: str) -> list[ConfigIssue]:
        """Return what a user has to change so that the server accepts a request.

        Args:
            config_name: Value of ``name``.
        """
        message, status = refused.message, refused.status
        context = f" of the context {self.context}" if self.context else ""
        if status == 401:
            text = f"{self.server} does not accept the credentials{context}; log in again"
            return [ConfigIssue("launch.kubernetes.context", text)]
        if status == 403 and "exceeded quota" in message:
            return [ConfigIssue("launch.kubernetes.namespace", message, self.namespace)]
        if status == 403:
            text = f"{self.server} does not allow to {refused.action}: {message}"
            return [ConfigIssue("launch.kubernetes.namespace", text, self.namespace)]
        if refused.is_unknown_kind:
            return [self._missing_kind(refused.kind)]
        if status == 404 and re.search(r'namespaces? "', message):
            text = f"there is no such namespace at {self.server}; create it, or write another"
            return [ConfigIssue("launch.kubernetes.namespace", text, self.namespace)]
        if status == 409:
            text = (
                f"{self.namespace} has one of this name already (could not {refused.action}); "
                "choose another name, or end that run with axonlaunch stop and kubectl delete"
            )
            return [ConfigIssue("name", text, config_name)]
        if refused.kind == "TrainJob" and _NEW_IN_TRAINER.search(message):
            text = f"needs Kubeflow Trainer {_TRAINER}; use jobset, or install it: {message}"
            return [ConfigIssue("launch.kubernetes.kind", text, KEYS[refused.kind])]
        causes = (refused.content.get("details") or {}).get("causes") or []
        if status in (400, 422) and causes:
            return [
                ConfigIssue("", f"{self.server} refuses {_field(cause)}: {cause.get('message')}")
                for cause in causes
            ]
        return [ConfigIssue("", f"{self.server} refuses to {refused.action}: {message}")]

    def _missing_kind(self, kind: str) -> ConfigIssue:
        kinds = self.known_kinds()
        use = f"use {' or '.join(kinds)}, or install it" if kinds else "install it"
        message = f"{self.server} has no {kind}s; {use}"
        return ConfigIssue("launch.kubernetes.kind", message, KEYS[kind])


def _field(cause: dict[str, Any]) -> str:
    return str(cause.get("field") or "the object")


def _find_context(contexts: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    by_name = {context["name"]: context for context in contexts}
    if name not in by_name:
        message = f"the kubeconfig has no such context; it has {', '.join(sorted(by_name))}"
        raise ConfigError([ConfigIssue("launch.kubernetes.context", message, name)])
    return by_name[name]


def _in_pod(settings: Any, error: Exception, context: str | None) -> str:
    """Use the service account of this pod, and return its namespace.

    Raises:
        ConfigError: This process is not in a pod.
    """
    from pathlib import Path

    from kubernetes import config

    try:
        if context is None:
            config.load_incluster_config(client_configuration=settings)
            account = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
            return account.read_text().strip()
    except (config.ConfigException, OSError):
        pass
    message = f"no usable kubeconfig ({_short(str(error))}); set KUBECONFIG, or log in to a cluster"
    raise ConfigError([ConfigIssue("launch.name", message, "kubernetes")]) from None


def _content(body: bytes) -> dict[str, Any]:
    text = body.decode(errors="replace")
    try:
        content = json.loads(text)
    except ValueError:
        return {"message": text.strip()}
    return content if isinstance(content, dict) else {"message": text}


def _short(text: str) -> str:
    """Return a message of urllib3 without the name of its object."""
    return re.sub(r"^.*?<[^>]*>:\s*|^HTTPS?Connection\([^)]*\):\s*", "", " ".join(text.split()))
