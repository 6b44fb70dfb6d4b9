"""Runs cases of every kind in turn, up to a number or a time limit, and prints a table.

A case is fully determined by a kind and a seed, which repeat a failure. Kinds are independent of
each other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests")]

# ruff: noqa: E402 (these imports need the path set above)
import corpora
import corruptions
import goodput
import hostile_folders
import kills
import moves
import neighbors
import pods
import pytest
import resources
from lab import Lab, Log
from rich.console import Console
from rich.table import Table
from support import served


@dataclass(frozen=True)
class Kind:
    """A kind of harm.

    Attributes:
        about: Description.
        run: Function of the lab, a seed and a log; raises AssertionError if the run was harmed.
        number: Number of cases for full coverage.
    """

    about: str
    run: Callable[[Lab, int, Log], None]
    number: int


KINDS = {
    "kill": Kind("kills and stops of any process", kills.anywhere, 15),
    "save": Kind("kills while saving", kills.while_saving, 6),
    "corpus": Kind("a run on text, also while it tokenizes", corpora.run, 10),
    "corruption": Kind("a file of a run is changed", corruptions.run, len(corruptions.KINDS)),
    "resource": Kind("disk, files or folders run out", resources.run, len(resources.KINDS)),
    "folder": Kind("a stranger's folder is used", hostile_folders.run, len(hostile_folders.KINDS)),
    "move": Kind("kills, then another layout of experts", moves.few, 2),
    "soak": Kind("500 steps with such kills (only if named)", moves.soak, 0),
    "goodput": Kind("goodput as predicted (only if named)", goodput.predicted, 0),
    "neighbor": Kind("a stranger on the network", neighbors.run, len(neighbors.KINDS)),
    "pods": Kind("kills of pods, suspended Jobs (only if named)", pods.run, 0),
}


@dataclass
class Tally:
    """Results of a kind's cases.

    Attributes:
        faults: Number of harmful actions; a case may have several.
        skipped: Reasons why cases could not run here.
    """

    cases: int = 0
    faults: int = 0
    passed: int = 0
    failed: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A failed case.

    Attributes:
        repeat: Command that repeats it.
        done: Actions on the run.
        reason: Error that was found.
    """

    repeat: str
    done: str
    reason: str


def main() -> int:
    """Run cases; return the exit status."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and clean up
    Path(options.keep or tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.keep)).resolve()
    tallies = {name: Tally() for name in options.only}
    failures: list[Failure] = []
    end = time.monotonic() + (options.seconds or float("inf"))
    try:
        with served.serve() as server:
            lab = Lab(folder, server)
            for name, seed in _cases(options):
                if time.monotonic() > end:
                    break
                _try(name, seed, lab, tallies[name], failures)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    _report(tallies, failures)
    if options.json:
        content = {
            "kinds": {name: asdict(tally) for name, tally in tallies.items()},
            "failures": [asdict(failure) for failure in failures],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--runs", type=int, help="number of cases of each kind (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case of each kind")
    parser.add_argument("--seconds", type=float, help="seconds after which no case begins")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--json", type=Path, help="file to write the table to")
    parser.add_argument("--keep", help="folder in which the folders of all runs are kept")
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return kinds and seeds, with every kind early, because time may run out at any moment.

    Kinds without a number of cases take minutes, and run only if ``--only`` names them.
    """
    are_named = options.only != list(KINDS)
    numbers = {
        name: options.runs or KINDS[name].number or 1
        for name in options.only
        if KINDS[name].number or are_named
    }
    # Sorted by the fraction of its kind that is done by then.
    shares = [(i / count, i, name) for name, count in numbers.items() for i in range(count)]
    return [(name, options.seed + i) for _, i, name in sorted(shares, key=lambda share: share[:1])]


def _try(name: str, seed: int, lab: Lab, tally: Tally, failures: list[Failure]) -> None:
    log, begun = Log(), time.monotonic()
    reason = ""
    try:
        KINDS[name].run(lab, seed, log)
    except pytest.skip.Exception as skipped:
        tally.skipped.append(str(skipped))
        return
    except (AssertionError, OSError, ValueError, KeyError) as error:
        reason = str(error) or type(error).__name__
    finally:
        lab.kill_what_is_left()
    tally.cases += 1
    tally.faults += log.faults
    tally.failed += bool(reason)
    tally.passed += not reason
    verdict = f"FAILED: {reason}" if reason else "passed"
    print(f"{name} {seed}: {log}: {verdict} ({time.monotonic() - begun:.0f} s)", flush=True)
    if reason:
        repeat = f"scripts/chaos --only {name} --seed {seed} --runs 1"
        failures.append(Failure(repeat, str(log), reason))


def _report(tallies: dict[str, Tally], failures: list[Failure]) -> None:
    console = Console()
    table = Table("kind", "what", "cases", "faults", "passed", "failed", "skipped")
    for name, tally in tallies.items():
        row = (tally.cases, tally.faults, tally.passed, tally.failed, len(tally.skipped))
        table.add_row(name, KINDS[name].about, *map(str, row))
    console.print(table)
    for failure in failures:
        console.print(f"{failure.repeat}\n  {failure.done}\n  {failure.reason}", markup=False)
    for reason in sorted({reason for tally in tallies.values() for reason in tally.skipped}):
        console.print(f"skipped: {reason}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
