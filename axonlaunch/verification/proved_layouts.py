"""Which layouts were proved equal to one process for which models of transformers.

It reads what ``scripts/bench hf`` wrote, and imports neither torch nor transformers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "proved_layouts.json"


@dataclass(frozen=True)
class Family:
    """A class of models.

    Attributes:
        class_name: Transformers' name of it.
        also: Other ``model_type`` of the same class.
        refused: By layout that was not proved: why.
        notes: By layout that was: with what settings, or to what rounding.
    """

    class_name: str
    also: tuple[str, ...]
    refused: Mapping[str, str]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class Proved:
    """What was proved of every causal language model of a version of transformers.

    Attributes:
        versions: Of transformers and torch, with which it was.
        classes: Causal language models that this version of transformers has.
        layouts: By name: the overrides.
        families: By ``model_type``, those that were run under every layout.
    """

    versions: Mapping[str, str]
    classes: int
    layouts: Mapping[str, list[str]]
    families: Mapping[str, Family]

    @property
    def named(self) -> dict[str, Family]:
        """Families by every ``model_type``, also those that share a class."""
        also = {other: family for family in self.families.values() for other in family.also}
        return dict(sorted((also | dict(self.families)).items()))


@functools.cache
def proved_table() -> Proved:
    """Return the table that comes with the package."""
    content = json.loads(FILE.read_text())
    families = {
        kind: Family(entry["class"], tuple(entry["also"]), entry["refused"], entry["notes"])
        for kind, entry in content["families"].items()
    }
    return Proved(content["versions"], content["classes"], content["layouts"], families)
