"""Writes ``events.jsonl``: all events of a run except steps, in order of time, for its report.

Each line is a JSON object with the time in seconds since 1970. All attempts of a run write to the
same file; each begins with ``started``. Measurements of steps are in ``metrics.jsonl``.
"""

from __future__ import annotations

import platform
import socket
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from axonlaunch.events import (
    Evaluated,
    Event,
    Finished,
    Started,
    StepDone,
    StepLogged,
)
from axonlaunch.system.storage.run_files import append_event
from axonlaunch.system.text.units import Counted, named_by_unit


class EventLog:
    """Appends a run's events to a file in its folder. Only the main rank has one."""

    def __init__(self, folder: Path, *, world_size: int, counted: Counted = "tokens") -> None:
        """Prepare to write; nothing is written yet.

        Args:
            folder: Run folder.
            world_size: Number of ranks of this attempt.
            counted: Unit that the loss counts, used in names of metrics.
        """
        self._counted = counted
        self._folder = folder
        self._world_size = world_size

    def __call__(self, event: Event) -> None:
        """Append an event unless it is that of a step.

        Raises:
            OSError: The file can't be written.
        """
        if isinstance(event, StepDone | StepLogged | Finished):  # the launcher writes the end
            return
        fields: dict[str, Any] = asdict(event)
        if isinstance(event, Evaluated):
            fields = named_by_unit(fields, self._counted)
        if isinstance(event, Started):
            fields |= {"world_size": self._world_size, **_about_this_process()}
        append_event(self._folder, name_of(event), fields)


def name_of(event: Event) -> str:
    """Return the kind of an event, such as ``rank_times`` for a ``RankTimes``."""
    name = type(event).__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _about_this_process() -> dict[str, Any]:
    versions = {
        "axonlaunch": version("axonlaunch"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {"host": socket.gethostname(), "versions": versions}
