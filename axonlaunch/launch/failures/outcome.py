"""How a run ended, on the node that started its ranks or in a rank that others started.

It is what is known when no rank is left; how the run is reported is for others to decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.events import Finished
from axonlaunch.launch.failures.report import Crash


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        finished: What its ranks reported, where all came to an end.
        crash: Why it failed, where it did.
        killed: Whether it was ended without waiting for a step.
        stop_requested: Whether it was asked to stop meanwhile, by a person or a scheduler.
    """

    finished: Finished | None = None
    crash: Crash | None = None
    killed: bool = False
    stop_requested: bool = False

    @property
    def was_stopped(self) -> bool:
        """Whether somebody wanted it to end, also where it then failed while stopping."""
        return self.stop_requested or was_interrupted(self)


def was_interrupted(outcome: Outcome) -> bool:
    """Whether a person or a scheduler ended a run."""
    if outcome.crash is not None:
        return outcome.crash.first.kind == "interrupted"
    return outcome.killed or (outcome.finished is not None and outcome.finished.interrupted)
