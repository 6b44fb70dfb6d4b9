"""Reads the samples that the nodes of a run took of their own use, only if they are needed.

A run of 100 nodes has 100 files of samples, which a list of runs does not need.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from axonlaunch.diagnostics.report.growing_lines import GrowingLines
from axonlaunch.system.storage.run_files import events_of_rank

_LARGEST_RANK = 10**7


class NodeSamples:
    """Samples of all nodes except that of the main rank, whose samples are in ``events.jsonl``.

    Attributes:
        notes: Files that could not be read, and why.
    """

    def __init__(self, path: Path) -> None:
        """Remember the local or remote run folder (``upath``)."""
        self._path = path
        self._growing: dict[int, GrowingLines] = {}
        self.notes: list[str] = []

    def read(self) -> dict[int, list[dict[str, Any]]]:
        """Return the events by the first rank of each node. Only new lines are read."""
        self.notes = []
        events = {}
        for rank in ranks_with_events(self._path):
            name = events_of_rank(rank)
            growing = self._growing.setdefault(rank, GrowingLines(self._path / name))
            try:
                growing.read()
            except OSError as error:
                self.notes.append(f"{name} can't be read: {error.strerror or error}")
                continue
            if growing.unreadable:
                self.notes.append(f"{growing.unreadable} lines of {name} can't be read")
            events[rank] = growing.lines
        return events


def ranks_with_events(path: Path) -> list[int]:
    """Return the ranks, except 0, that wrote events to a run folder, in ascending order."""
    pattern = Path(events_of_rank(_LARGEST_RANK))
    try:
        names = [
            file.name
            for file in (path / pattern.parent).glob(pattern.name.replace(str(_LARGEST_RANK), "*"))
        ]
    except OSError:
        return []
    numbers = (re.match(r"rank_([1-9]\d{0,6})\.", name) for name in names)
    return sorted(int(number[1]) for number in numbers if number)
