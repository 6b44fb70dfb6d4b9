"""How a run ended, on the node that started its ranks or in a rank that others started.

It is what is known when no rank is left; how the run is reported is for others to decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.events import Finished
from axonlaunch.launch.failures.report import Crash


@dataclass
class Outcome:
    """How a run ended."""

    finished: Finished | None = None
    crash: Crash | None = None
    killed: bool = False


def was_interrupted(outcome: Outcome) -> bool:
    """Whether a person or a scheduler ended a run."""
    if outcome.crash is not None:
        return outcome.crash.first.kind == "interrupted"
    return outcome.killed or (outcome.finished is not None and outcome.finished.interrupted)
