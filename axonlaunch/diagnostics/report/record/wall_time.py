"""Divides the wall time of a run into productive steps, saves, lost steps and restarts.

The parts are those that ``planning.throughput.goodput`` predicts. They follow from the events of
all attempts at the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from axonlaunch.diagnostics.report.record.run_record import RunRecord
from axonlaunch.diagnostics.report.record.run_timeline import (
    attempts_with_ends,
    number_of,
    step_seconds,
)

_Attempts: TypeAlias = Sequence[tuple[dict[str, Any], float]]
"""First event and end of each attempt."""


@dataclass(frozen=True, kw_only=True)
class WallTime:
    """Parts of a run's wall time in seconds, without pauses after it was stopped on request.

    Attributes:
        productive_s: Training steps whose results were kept; a repeated step counts once.
        saving_s: Waiting for saves.
        lost_s: Steps of an attempt after the checkpoint from which the next attempt resumed.
        restarting_s: Time from a failure, which is noticed later, until the ranks of the next
            attempt are ready.
        other_s: The first start, evaluations, and everything else.
        failures: Number of attempts that failed.
        restarts: Number of attempts after a failure whose ranks became ready.
        written_s: Mean seconds from the beginning of a save to a complete checkpoint; 0 without.
        saves: Number of checkpoints that were saved and not lost.
    """

    productive_s: float
    saving_s: float
    lost_s: float
    restarting_s: float
    other_s: float
    failures: int
    restarts: int
    written_s: float
    saves: int

    @property
    def total_s(self) -> float:
        """Wall time of the run."""
        parts = (self.productive_s, self.saving_s, self.lost_s, self.restarting_s, self.other_s)
        return sum(parts)

    @property
    def goodput(self) -> float:
        """Fraction of the wall time in productive steps."""
        return self.productive_s / self.total_s


def wall_time(run: RunRecord) -> WallTime | None:
    """Return the parts of a run's wall time; None if it is unknown."""
    attempts = attempts_with_ends(run)
    sums: Counter[str] = Counter()
    for index in range(len(attempts)):
        sums.update(_spent(run, attempts, index))
    productive = min(step_seconds(run), max(0.0, sums["kept"] - sums["saving"]))
    explained = productive + sums["saving"] + sums["lost"] + sums["restarting"]
    total = sums["starting"] + sums["kept"] + sums["lost"] + sums["restarting"]
    if total <= 0 or not run.steps:
        return None
    written = [number_of(save, "seconds") for save in run.events_of_kind("saved")]
    return WallTime(
        productive_s=productive,
        saving_s=sums["saving"],
        lost_s=sums["lost"],
        restarting_s=sums["restarting"],
        other_s=max(0.0, total - explained),
        failures=int(sums["failures"]),
        restarts=int(sums["restarts"]),
        written_s=sum(written) / len(written) if written else 0.0,
        saves=int(sums["saves"]),
    )


def _spent(run: RunRecord, attempts: _Attempts, index: int) -> dict[str, float]:
    """Return the seconds and numbers that an attempt adds to those of the run.

    ``starting`` and ``restarting`` are the time until its ranks were ready, ``kept`` the time up to
    the checkpoint from which the next attempt continued, and ``saving`` a part of ``kept``.
    """
    began, end = attempts[index]
    previous_end = attempts[index - 1][1] if index else None
    start = float(began["time"])
    ready = float(began.get("ready", start))
    is_ready = began["event"] != "launched"
    if not is_ready:  # it ended before its ranks were ready
        ready = end
    stops = {
        event["time"] for event in run.events_of_kind("ended") if event.get("status") != "failed"
    }
    follows_failure = previous_end is not None and previous_end not in stops
    since_failure = ready - previous_end if previous_end is not None and follows_failure else 0.0
    resumed = _first_step(attempts[index + 1 :])
    saves = [save for save in run.events_of_kind("saved") if ready <= save["time"] <= end]
    kept_until = end
    if resumed is not None:
        kept_until = _kept_until(run, began, (ready, end), saves=saves, resumed=resumed)
    kept = [save for save in saves if _taken_at(save) <= kept_until]
    lost = min(end - kept_until, _repeated_s(run, end, resumed))
    has_failed = end not in stops
    if index == len(attempts) - 1:
        has_failed = run.status == "killed" or end in {
            e["time"] for e in run.events_of_kind("failed")
        }
    return {
        "starting": 0.0 if follows_failure else ready - start,
        "restarting": since_failure + end - kept_until - lost,
        "kept": kept_until - ready,
        "saving": sum(number_of(save, "stalled_s") for save in kept),
        "saves": len(kept),
        "lost": lost,
        "failures": has_failed,
        "restarts": follows_failure and is_ready,
    }


def _first_step(attempts: _Attempts) -> int | None:
    """Return the step of the first attempt whose ranks became ready; None if there is none."""
    steps = (began.get("step") for began, _ in attempts)
    return next((step for step in steps if isinstance(step, int)), None)


def _repeated_s(run: RunRecord, end: float, resumed: int | None) -> float:
    """Return the time of the steps that an attempt has done in vain, with half of the last one.

    Args:
        run: Record of the run.
        end: Time at which the failure of the attempt was recorded.
        resumed: Step from which the next attempt continued.
    """
    steps = [
        failure.get("step") for failure in run.events_of_kind("failed") if failure["time"] == end
    ]
    if resumed is None or not steps or not isinstance(steps[0], int):
        return math.inf
    mean_s = step_seconds(run) / max(1, int(run.steps[-1]["step"]) - run.first_step)
    return max(0.0, steps[0] - resumed + 0.5) * mean_s


def _kept_until(
    run: RunRecord,
    began: dict[str, Any],
    times: tuple[float, float],
    *,
    saves: Sequence[dict[str, Any]],
    resumed: int,
) -> float:
    """Return the time up to which the steps of an attempt count.

    Args:
        run: Record of the run.
        began: First event of the attempt.
        times: Time from which its ranks were ready, and its end.
        saves: Checkpoints that it saved.
        resumed: Step from which the next attempt continued.
    """
    ready, end = times
    first = int(number_of(began, "step"))
    taken = [_taken_at(save) for save in saves if save.get("step") == resumed]
    if taken:
        return min(end, max(ready, taken[-1]))
    if resumed <= first:
        return ready
    # The attempt ended between writing the checkpoint and recording it.
    steps = max(1, int(run.steps[-1]["step"]) - first)
    return min(end, ready + step_seconds(run, after=first) * (resumed - first) / steps)


def _taken_at(save: dict[str, Any]) -> float:
    """Return the time from which training continued after a save, without steps from then on."""
    return float(save["time"]) - number_of(save, "seconds") + number_of(save, "stalled_s")
