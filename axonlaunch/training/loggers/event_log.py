"""``events.jsonl``: what happened to a run beside its steps, in the order of time, for its report.

A line of JSON an event, with the time in seconds since 1970. Attempts of a run follow each other in
one file: each begins with ``started``. What a step measured is in ``metrics.jsonl``.
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
    Counted,
    Evaluated,
    Event,
    Finished,
    Started,
    StepDone,
    StepLogged,
    named_by_unit,
)
from axonlaunch.system.run_files import append_event


class EventLog:
    """Adds a run's events to a file of its folder; the main rank alone has one."""

    def __init__(self, folder: Path, *, world_size: int, counted: Counted = "tokens") -> None:
        """Prepare to write; nothing is written yet.

        Args:
            folder: The run's.
            world_size: Ranks of this attempt.
            counted: What targets are, for the names of their numbers.
        """
        self._counted = counted
        self._folder = folder
        self._world_size = world_size

    def __call__(self, event: Event) -> None:
        """Add an event, but for a step's.

        Raises:
            OSError: The file can't be written.
        """
        if isinstance(event, StepDone | StepLogged | Finished):  # how it ended its launcher writes
            return
        fields: dict[str, Any] = asdict(event)
        if isinstance(event, Evaluated):
            fields = named_by_unit(fields, self._counted)
        if isinstance(event, Started):
            fields |= {"world_size": self._world_size, **_about_this_process()}
        append_event(self._folder, name_of(event), fields)


def name_of(event: Event) -> str:
    """Return the kind of an event: ``rank_times`` of a ``RankTimes``."""
    name = type(event).__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _about_this_process() -> dict[str, Any]:
    versions = {
        "axonlaunch": version("axonlaunch"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {"host": socket.gethostname(), "versions": versions}
