"""The outcome of a run, as known to a node's launcher or to a rank after the run has ended."""

from __future__ import annotations

from dataclasses import dataclass

from axonlaunch.events import Finished
from axonlaunch.launch.failures.report import Crash


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        finished: Merged results of the ranks; None if not all finished.
        crash: The failure; None if the run did not fail.
        killed: Whether the run was killed without waiting for the end of a step.
        stop_requested: Whether a user or a scheduler requested a stop during the run.
    """

    finished: Finished | None = None
    crash: Crash | None = None
    killed: bool = False
    stop_requested: bool = False

    @property
    def was_stopped(self) -> bool:
        """Whether a user or a scheduler ended the run, even if it failed while stopping."""
        return self.stop_requested or was_interrupted(self)


def was_interrupted(outcome: Outcome) -> bool:
    """Return whether a user or a scheduler ended the run."""
    if outcome.crash is not None:
        return outcome.crash.first.kind == "interrupted"
    return outcome.killed or (outcome.finished is not None and outcome.finished.interrupted)
