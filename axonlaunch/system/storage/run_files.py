"""Names of the files in a run folder, and writing of the file that ranks and launcher share."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axonlaunch.system.storage.files import append_text
from axonlaunch.system.storage.strict_json import finite

CONFIG = "config.yaml"
"""The frozen configuration, by which a folder is known to be a run."""
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
TOKENIZER = "tokenizer"
"""Folder with the files of the run's tokenizer."""
ORIGINS = "origins.json"
"""Source of each configuration value, by dotted key."""
ESTIMATE = "estimate.json"
"""Estimated memory peak of each distinct rank with its parts, as computed by ``estimate``."""
STEP_TIME = "step_time.json"
"""Predicted time of a step with its parts, or the reason why there is no prediction."""
CRASH = "crash.json"
"""Report of the first failed rank; exists only in the folder of a failed run."""
EVENTS = "events.jsonl"
"""All events of a run except steps, in order of time, over all attempts."""


def events_of_rank(rank: int) -> str:
    """Return the path, in a run folder, of the events that a rank itself writes.

    Ranks other than the main rank have a file beside their log, because appends of several nodes to
    one file of a network file system can overwrite each other.
    """
    return EVENTS if rank == 0 else f"logs/rank_{rank}.{EVENTS}"


def append_event(folder: Path, kind: str, fields: Mapping[str, Any], *, rank: int = 0) -> None:
    """Append an event with the time in seconds since 1970, its kind and its fields.

    Args:
        folder: Run folder.
        kind: Kind of event: launched, started, saved, ...
        fields: Plain values by name.
        rank: Rank that writes; the launcher and the main rank share a file.

    Raises:
        OSError: The file can't be written.
    """
    line = finite({"time": round(time.time(), 3), "event": kind, **fields})
    append_text(folder / events_of_rank(rank), json.dumps(line, allow_nan=False) + "\n")
