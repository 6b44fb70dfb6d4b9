"""Checks the keys and types of an object offline, against the classes of the Kubernetes client.

The own keys of a JobSet or a TrainJob are checked by the server.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from axonlaunch.launch.external.kubernetes.checks import pod_template

_PLAIN: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
}


def schema_problems(job: dict[str, Any], kind: str) -> list[str]:
    """Return the unknown keys and wrong types of an object.

    Args:
        job: The Job, JobSet or TrainJob.
        kind: Value of ``launch.kubernetes.kind``.
    """
    if kind == "job":
        return list(_problems(job, "V1Job", ""))
    if kind == "jobset":
        return [
            problem
            for number, child in enumerate(job["spec"].get("replicatedJobs") or [])
            for problem in _problems(
                child.get("template") or {},
                "V1JobTemplateSpec",
                f"spec.replicatedJobs[{number}].template",
            )
        ]
    trainer = job["spec"].get("trainer") or {}
    resources = _problems(
        trainer.get("resourcesPerNode") or {}, "V1ResourceRequirements", "resourcesPerNode"
    )
    template = pod_template(job, kind) or {}
    return [*resources, *_problems(template, "V1PodTemplateSpec", "template")]


def _problems(value: Any, expected: str, path: str) -> Iterator[str]:
    if value is None:
        return
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", expected):
        if not isinstance(value, list):
            yield f"{path}: expected a list"
            return
        for number, entry in enumerate(value):
            yield from _problems(entry, match[1], f"{path}[{number}]")
    elif match := re.fullmatch(r"[Dd]ict[(\[]\w+, (.+)[)\]]", expected):
        if not isinstance(value, dict):
            yield f"{path}: expected a mapping"
            return
        for key, entry in value.items():
            # Quantities are texts, and numbers are accepted for them.
            number = isinstance(entry, int) and not isinstance(entry, bool)
            if not (number and path.endswith(("limits", "requests"))):
                yield from _problems(entry, match[1], f"{path}.{key}")
    elif expected in _PLAIN:
        is_bool = isinstance(value, bool) and expected != "bool"
        if not isinstance(value, _PLAIN[expected]) or is_bool:
            yield f"{path}={value!r}: expected {expected}"
    elif expected in ("object", "datetime", "IntOrString"):
        return
    else:
        yield from _model_problems(value, expected, path)


def _model_problems(value: Any, expected: str, path: str) -> Iterator[str]:
    from kubernetes.client import models

    model = getattr(models, expected)
    if not isinstance(value, dict):
        yield f"{path}: expected a mapping"
        return
    types = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    for key, entry in value.items():
        below = f"{path}.{key}".lstrip(".")
        if key not in types:
            close = difflib.get_close_matches(str(key), types, n=1)
            yield f"{below}: there is no such key{f'; did you mean {close[0]}?' * bool(close)}"
        else:
            yield from _problems(entry, types[key], below)
