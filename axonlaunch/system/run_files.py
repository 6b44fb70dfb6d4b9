"""The files of a run's folder by name, and the one that its ranks and its launcher both add to.

What is in the others is known to who writes them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axonlaunch.system.files import append_text
from axonlaunch.system.strict_json import finite

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
TOKENIZER = "tokenizer"
"""Folder of the files of the tokenizer that a run was trained with."""
ORIGINS = "origins.json"
"""What set each value of the configuration, by dotted key."""
ESTIMATE = "estimate.json"
"""The estimated peak of each distinct rank with its parts, as ``estimate`` finds it."""
STEP_TIME = "step_time.json"
"""The predicted time of a step with its parts, or why it is not predicted."""
CRASH = "crash.json"
"""Who failed first and why, in the folder of a run that failed."""
EVENTS = "events.jsonl"
"""What happened to a run beside its steps, in the order of time; attempts follow each other."""


def append_event(folder: Path, kind: str, fields: Mapping[str, Any]) -> None:
    """Add an event: the time in seconds since 1970, its kind, its fields.

    Args:
        folder: The run's.
        kind: launched, started, saved, ...
        fields: Plain values.

    Raises:
        OSError: The file can't be written.
    """
    line = finite({"time": round(time.time(), 3), "event": kind, **fields})
    append_text(folder / EVENTS, json.dumps(line, allow_nan=False) + "\n")
