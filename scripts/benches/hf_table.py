"""Reads and writes the table of ``scripts/bench hf``, which ``axonlaunch ls hf`` shows."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import hf_tiny

from axonlaunch.verification.proofs import proved_layouts


@dataclass(frozen=True)
class Row:
    """The outcome of training one model class under one layout.

    Attributes:
        model_type: ``model_type`` of the class's configuration.
        layout: Key in ``hf.LAYOUTS``.
        outcome: equal, different, refused (before anything starts), failed or late.
        reason: Why the outcome is not equal, or the settings that equality needed.
        versions: Versions of transformers and torch, as ``label`` writes them.
    """

    model_type: str
    layout: str
    outcome: str
    reason: str = ""
    versions: str = ""


def write(
    rows: Iterable[Row],
    *,
    versions: Mapping[str, str],
    classes: int,
    layouts: Mapping[str, list[str]],
) -> None:
    """Write the package's data file, with one line per class."""
    head = {"versions": dict(versions), "classes": classes, "layouts": dict(layouts)}
    columns = list(layouts)
    rows = sorted(rows, key=lambda row: columns.index(row.layout))
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    families = [f"  {json.dumps(kind)}: {json.dumps(family)}" for kind, family in _families(rows)]
    lines += [' "families": {', ",\n".join(families), " }"]
    proved_layouts.FILE.write_text("\n".join(["{", *lines, "}", ""]))
    proved_layouts.proved_table.cache_clear()


def label(versions: Mapping[str, str]) -> str:
    """Return the text of ``Row.versions``."""
    return " ".join(f"{name} {version}" for name, version in versions.items())


def shipped() -> Iterator[Row]:
    """Yield the rows of the packaged table."""
    table = proved_layouts.proved_table()
    versions = label(table.versions)
    for kind, family in table.families.items():
        for layout in table.layouts:
            if refusal := family.refused.get(layout):
                outcome, _, reason = refusal.partition(": ")
            else:
                outcome, reason = "equal", family.notes.get(layout, "")
            yield Row(kind, layout, outcome, reason, versions)


def _families(rows: Iterable[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    from axonlaunch.models.hf.reading import library

    types, by_type = library.causal_types(), defaultdict(list)
    for row in rows:
        by_type[row.model_type].append(row)
    for kind, of_kind in sorted(by_type.items()):
        equal = {row.layout: row.reason for row in of_kind if row.outcome == "equal"}
        yield (
            kind,
            {
                "class": str(types[kind]),
                # Composite models (text and images, for example) are refused as a whole.
                "also": [
                    other
                    for other in types
                    if types[other] == types[kind]
                    and other != kind
                    and not hf_tiny.is_composite(other)
                ],
                "refused": {
                    row.layout: _portable(f"{row.outcome}: {row.reason}")
                    for row in of_kind
                    if row.outcome != "equal"
                },
                "notes": {layout: note for layout, note in equal.items() if note},
            },
        )


def _portable(reason: str) -> str:
    """Remove temporary folders and the memory of this machine from a reason."""
    reason = re.sub(r"/tmp/\w+/", "", reason)
    return reason.partition("; a rank's share of this node's memory")[0]
