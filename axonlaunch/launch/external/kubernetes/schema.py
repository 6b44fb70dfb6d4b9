"""Checks the keys and types of an object offline, against the classes of the Kubernetes client."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from axonlaunch.launch.external.kubernetes.custom_kinds import CUSTOM_KINDS

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
    expected = {"job": "V1Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind]
    return list(_problems(job, expected, ""))


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
    if not isinstance(value, dict):
        yield f"{path}: expected a mapping"
        return
    types = CUSTOM_KINDS.get(expected) or _client_types(expected)
    for key, entry in value.items():
        below = f"{path}.{key}".lstrip(".")
        if key not in types:
            close = difflib.get_close_matches(str(key), types, n=1)
            hint = "".join(f"; did you mean {each}?" for each in close)
            yield f"{below}: there is no such key{hint}"
        else:
            yield from _problems(entry, types[key], below)


def _client_types(expected: str) -> dict[str, str]:
    """Return the types by key of a class of the Kubernetes client."""
    from kubernetes.client import models

    model = getattr(models, expected)
    return {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
