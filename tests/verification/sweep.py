"""Verifies combinations of the parity table in one process: any failure is a false alarm.

``python tests/verification/sweep.py``, or ``scripts/test --sweep``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

# ruff: noqa: E402 (these imports need the path set above)
from rich.console import Console
from rich.table import Table
from support.configured import run_config
from support.parity_table import BATCH, Combination, combinations

from axonlaunch.config import ConfigError
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.comparison.comparison_config import harder_config
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

STEPS = 6
"""Same number as in ``axonlaunch verify``."""
OUTCOMES = ("passed", "one rank", "refused", "alarm")


@dataclass(frozen=True)
class Outcome:
    """Result of a combination.

    Attributes:
        kind: One of ``OUTCOMES``. For a single rank, which has nothing to differ from, all values
            are compared, too.
        reason: Why it did not pass.
    """

    kind: str
    reason: str = ""


def verified(combination: Combination) -> Outcome:
    """Verify a combination as the command does."""
    ranks = combination.layout.ranks
    common = [f"train.global_batch_size={BATCH}", f"launch.nproc={ranks}", "launch.backend=mock"]
    overrides = [*combination.model_overrides, *combination.overrides, *common]
    try:
        config = run_config(overrides)
    except ConfigError as error:
        return Outcome("refused", str(error.problems[0]))
    plan = ComparisonPlan(steps=STEPS, beyond=True, original=config)
    verdict = compare.on_mock(harder_config(config, plan), plan)
    if verdict.passed:
        return Outcome("passed")
    if ranks == 1 and verdict.verdict == "nothing proved":
        return Outcome("one rank")
    first = verdict.failure or verdict.reason or str(verdict.differences[0])
    return Outcome("alarm", f"{verdict.verdict}: {first}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each combination and a table; return 1 after an alarm."""
    chosen = _options(arguments)
    every = [combination for combination in combinations() if chosen.only in str(combination)]
    random.Random(chosen.seed).shuffle(every)
    outcomes: dict[Combination, Outcome] = {}
    end = time.monotonic() + chosen.seconds
    for combination in every[: chosen.draw]:
        if time.monotonic() > end:
            break
        began = time.process_time()
        outcomes[combination] = outcome = verified(combination)
        what = ": ".join(filter(None, (outcome.kind, outcome.reason)))
        print(f"{combination}: {what} [{time.process_time() - began:.1f} s of CPU]", flush=True)
    _report(outcomes)
    return int(any(outcome.kind == "alarm" for outcome in outcomes.values()))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test --sweep", description=__doc__)
    parser.add_argument("--draw", type=int, help="so many combinations (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, and of the order")
    parser.add_argument("--only", default="", help="those whose name holds this text")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin none after so many seconds"
    )
    return parser.parse_args(arguments)


def _report(outcomes: dict[Combination, Outcome]) -> None:
    console = Console()
    rows: dict[str, Counter[str]] = {}
    for combination in combinations():
        if combination in outcomes:
            rows.setdefault(combination.layout.label, Counter())[outcomes[combination].kind] += 1
    table = Table("layout", "run", *OUTCOMES)
    for label, counts in [*rows.items(), ("", sum(rows.values(), Counter()))]:
        table.add_row(label, *_cells(counts))
    console.print(table)
    for combination, outcome in outcomes.items():
        if outcome.reason:
            console.print(f"{outcome.kind}: {combination}: {outcome.reason}", markup=False)


def _cells(counts: Counter[str]) -> Iterable[str]:
    yield str(counts.total())
    for kind in OUTCOMES:
        yield str(counts[kind] or "")


if __name__ == "__main__":
    sys.exit(main())
