"""Makes names of objects that Kubernetes accepts, and parses the texts of ``launch.kubernetes``."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 63
"""Characters of a DNS label, which each name of a pod and a Service must be (RFC 1035)."""
_SUFFIX = "-abcde"
"""Characters that a controller appends to the name of a pod."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_TOLERATION = re.compile(r"([^=:\s]+)(?:=([^=:\s]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?")


def object_name(name: str, *, longest_suffix: str) -> str:
    """Return the name of a run's objects: in lower case, with ``-`` for ``_``, ``.`` and ``/``.

    Args:
        name: Name of the run.
        longest_suffix: Suffix that forms the longest name of a pod of this object.

    Raises:
        ValueError: No legal name follows from it, or the names of pods would be too long.
    """
    legal = re.sub(r"[_./ ]+", "-", name.lower()).strip("-")
    if not _LABEL.fullmatch(legal):
        raise ValueError(
            "names of Kubernetes have letters a-z, digits and -, and begin with a letter; use "
            f"{_legal_name_like(legal)}"
        )
    most = LONGEST - len(longest_suffix) - len(_SUFFIX)
    if len(legal) > most:
        raise ValueError(
            f"has {len(legal)} characters, and names of pods leave {most} of {LONGEST}; use "
            f"{legal[:most].rstrip('-')}"
        )
    return legal


def is_object_name(text: str) -> bool:
    """Return whether a text is a legal name of a namespace, claim, Secret or queue."""
    return len(text) <= 253 and all(
        re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in text.split(".")
    )


def is_label_key(text: str) -> bool:
    """Return whether a text is a legal key of a label or resource: ``[PREFIX/]NAME``."""
    prefix, slash, name = text.rpartition("/")
    is_prefixed = is_object_name(prefix) if slash else not prefix
    return is_prefixed and len(name) <= LONGEST and bool(_LABEL_NAME.fullmatch(name))


def is_label_value(text: str) -> bool:
    """Return whether a text is a legal value of a label."""
    return not text or (len(text) <= LONGEST and bool(_LABEL_NAME.fullmatch(text)))


@dataclass(frozen=True)
class Volume:
    """A mounted PersistentVolumeClaim.

    Attributes:
        claim: Name of the claim.
        path: Absolute path in the containers.
        read_only: Whether it is mounted for reading only.
    """

    claim: str
    path: str
    read_only: bool

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Parse ``CLAIM:PATH[:ro]``.

        Raises:
            ValueError: The text has another form.
        """
        claim, _, rest = text.partition(":")
        path, _, mode = rest.partition(":")
        if not is_object_name(claim) or not path.startswith("/") or mode not in ("", "ro"):
            form = "is not CLAIM:/PATH or CLAIM:/PATH:ro, with the name of a claim in lower case"
            raise ValueError(f"{text!r} {form}")
        return cls(claim, path.rstrip("/") or "/", mode == "ro")

    def holds(self, path: str) -> bool:
        """Return whether an absolute path is on this volume."""
        return path == self.path or path.startswith(f"{self.path.rstrip('/')}/")


def toleration(text: str) -> dict[str, str]:
    """Parse ``KEY[=VALUE][:EFFECT]``, as ``kubectl taint`` writes a taint.

    Raises:
        ValueError: The text has another form.
    """
    match = _TOLERATION.fullmatch(text)
    if match is None or not is_label_key(match[1]) or not is_label_value(match[2] or ""):
        effects = "NoSchedule, PreferNoSchedule or NoExecute"
        raise ValueError(f"{text!r} is not KEY:EFFECT or KEY=VALUE:EFFECT, with {effects}")
    tolerated = {"key": match[1], "operator": "Exists" if match[2] is None else "Equal"}
    if match[2] is not None:
        tolerated["value"] = match[2]
    if match[3]:
        tolerated["effect"] = match[3]
    return tolerated


def is_quantity(text: str) -> bool:
    """Return whether a text is a quantity of memory, such as ``200Gi`` or ``1.5T``."""
    match = _QUANTITY.fullmatch(text)
    return match is not None and float(match[1]) > 0


def _legal_name_like(text: str) -> str:
    kept = re.sub(r"[^-a-z0-9]+", "-", text.encode("ascii", "ignore").decode()).strip("-")
    return kept if _LABEL.fullmatch(kept) else f"run-{kept}".rstrip("-")
