"""Predicts which part of a long run's time failures and saves leave for training.

Failures are independent (a Poisson process). After each one, the run restarts from its last
checkpoint and repeats the steps since then.

Source: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

_MOST_FAILURES = 1e6
"""Failures in an interval between saves from which a run is said to make no progress."""

_MANY = 1e4


@dataclass(frozen=True)
class SaveCosts:
    """Costs of saves and restarts, in seconds.

    Attributes:
        stalled_s: Time in which training waits for a save, if the previous one is written.
        written_s: Time from the beginning of a save until it can be read; longer than ``stalled_s``
            if the save is written during training.
        restart_s: Time from a failure until training continues from the checkpoint.
    """

    stalled_s: float
    written_s: float
    restart_s: float

    @property
    def unsaved_s(self) -> float:
        """Time of training that a save in progress does not protect yet."""
        return max(0.0, self.written_s - self.stalled_s)


@dataclass(frozen=True)
class Overheads:
    """Time that saves and failures add to a second of training that counts, in seconds.

    Attributes:
        saving: Waiting for saves.
        lost: Training and saves that are repeated after a failure.
        restarting: Time from failures until training continues.
        failures: Number of failures.
    """

    saving: float
    lost: float
    restarting: float
    failures: float

    def scaled_to(self, failures: float) -> Overheads:
        """Return the overheads of a run with another number of failures."""
        ratio = failures / self.failures if self.failures else 0.0
        return Overheads(self.saving, self.lost * ratio, self.restarting * ratio, failures)

    @property
    def goodput(self) -> float:
        """Fraction of the time in training that counts."""
        return 1 / (1 + self.saving + self.lost + self.restarting)


def overheads(costs: SaveCosts, *, interval_s: float, mtbf_s: float) -> Overheads:
    """Return the expected overheads of each second of training that counts.

    The time between failures is exponentially distributed, with a mean of M seconds. An interval
    with its save, of s seconds in total, is expected to fail n = exp(s / M) - 1 times before it
    succeeds, and takes n M seconds without restarts. No failure occurs during a restart. A save
    waits until the previous one is written.

    Args:
        costs: Costs of saves and restarts.
        interval_s: Seconds of training between saves.
        mtbf_s: Mean time between failures of the run in seconds.
    """
    stalled_s = costs.stalled_s + max(0.0, costs.unsaved_s - interval_s)
    whole_s = interval_s + stalled_s
    ratio = whole_s / mtbf_s
    failures = math.expm1(ratio) if ratio < math.log(_MOST_FAILURES) else _MOST_FAILURES
    lost_s = failures * (mtbf_s + costs.unsaved_s) - whole_s
    return Overheads(
        saving=stalled_s / interval_s,
        lost=max(0.0, lost_s) / interval_s,
        restarting=failures * costs.restart_s / interval_s,
        failures=failures / interval_s,
    )


def best_interval_s(costs: SaveCosts, *, mtbf_s: float) -> float:
    """Return the seconds of training between saves with the highest goodput.

    This is Daly's estimate. For saves that are much shorter than the time between failures it is
    Young's, ``sqrt(2 * save * mtbf)``. A save must be written before the next one begins.

    Args:
        costs: Costs of saves and restarts.
        mtbf_s: Mean time between failures of the run in seconds.
    """
    save_s = costs.stalled_s
    if save_s >= 2 * mtbf_s:
        return max(mtbf_s, costs.unsaved_s)
    ratio = save_s / (2 * mtbf_s)
    young_s = math.sqrt(2 * save_s * mtbf_s)
    return max(young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s, costs.unsaved_s)


def poisson_quantile(mean: float, probability: float) -> int:
    """Return the smallest number of events that is not exceeded with a probability.

    Args:
        mean: Expected number of events.
        probability: Probability below 1.
    """
    if not mean:
        return 0
    if mean > _MANY:  # the normal distribution differs by less than one event in a thousand
        return round(statistics.NormalDist(mean, math.sqrt(mean)).inv_cdf(probability))
    number, total = 0, 0.0
    while True:
        total += math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))
        if total >= probability:
            return number
        number += 1
