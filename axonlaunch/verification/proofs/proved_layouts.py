"""Table of layouts that were proved equal to one process, for each model of transformers.

The table is written by ``scripts/bench hf``. Imports neither torch nor transformers.
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
    """A model class of transformers.

    Attributes:
        class_name: Name of the class in transformers.
        also: Other values of ``model_type`` with the same class.
        refused: Maps each layout that was not proved to the reason.
        notes: Maps proved layouts to the settings or the tolerance that they needed.
    """

    class_name: str
    also: tuple[str, ...]
    refused: Mapping[str, str]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class ProvedTable:
    """Results for the causal language models of one version of transformers.

    Attributes:
        versions: Versions of transformers and torch that were tested.
        classes: Number of causal language models in this version of transformers.
        layouts: Maps the name of each layout to its overrides.
        families: Maps ``model_type`` to the model class, for classes run under every layout.
    """

    versions: Mapping[str, str]
    classes: int
    layouts: Mapping[str, list[str]]
    families: Mapping[str, Family]

    @property
    def families_by_type(self) -> dict[str, Family]:
        """Model classes by ``model_type``, including types that share a class."""
        shared = {other: family for family in self.families.values() for other in family.also}
        return dict(sorted((shared | dict(self.families)).items()))


@functools.cache
def proved_table() -> ProvedTable:
    """Read the table of proved layouts from the package's file."""
    content = json.loads(FILE.read_text())
    families = {
        kind: Family(entry["class"], tuple(entry["also"]), entry["refused"], entry["notes"])
        for kind, entry in content["families"].items()
    }
    return ProvedTable(content["versions"], content["classes"], content["layouts"], families)
