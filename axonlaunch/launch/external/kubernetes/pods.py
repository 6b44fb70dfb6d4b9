"""Reads the state of a pod and the times of its log."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from axonlaunch.launch.external.kubernetes.manifests import CONTAINER

_INDEX = "batch.kubernetes.io/job-completion-index"


def phase(pod: dict[str, Any]) -> str:
    """Return ``Pending``, ``Running``, ``Succeeded``, ``Failed`` or ``Unknown``; empty at first."""
    return str(pod.get("status", {}).get("phase", ""))


def waiting_reason(pod: dict[str, Any]) -> str:
    """Return why a pod does not run: no node for it, no image or another error; else empty."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return f"{name}: {reason}: {waiting.get('message', '')}".rstrip(": ")
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{name}: {condition.get('reason')}: {condition.get('message', '')}"
    return ""


def pod_index(pod: dict[str, Any]) -> int:
    """Return the number of a pod in its job; 0 for the pod of a job without an index."""
    metadata = pod["metadata"]
    places = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    return int(places.get(_INDEX, 0))


def has_log(pod: dict[str, Any]) -> bool:
    """Return whether the container of a pod has started."""
    return phase(pod) in ("Running", "Succeeded", "Failed")


def exit_code(pod: dict[str, Any]) -> int | None:
    """Return the exit status of the container of a pod; None if it has not ended."""
    for container in pod.get("status", {}).get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated")
        if container.get("name") == CONTAINER and ended:
            return int(ended.get("exitCode", 1))
    return None


def log_time(time: str) -> tuple[datetime, str] | None:
    """Return the second of a log line's time, in UTC, and the digits after the point.

    Nodes write their local time, and may omit zeros at the end. A line without a time, such as the
    node's message that a log is being rotated, is not of the run: None.
    """
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT[\d:]{8})(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", time)
    if match is None:
        return None
    second = datetime.fromisoformat(f"{match[1]}{match[3]}").astimezone(UTC)
    return second, (match[2] or "").ljust(9, "0")
