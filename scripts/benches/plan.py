"""Compares ``axonlaunch plan``'s first choice on this machine with the fastest layout.

Every layout that recomputes nothing trains for a few steps; then the quickest of them and the
planned one take turns. Prints medians of a step, and the ratio of the planned one to the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from axonlaunch.config import load, with_values
from axonlaunch.config.problems.errors import plain
from axonlaunch.planning.search.candidates import candidates

COMMAND = str(Path(sys.executable).with_name("axonlaunch"))
FINALISTS = 4
_NONE = {"train.activation_checkpointing": "none"}

Layout = tuple[str, ...]


def step_seconds(overrides: list[str], layout: Layout, *, ranks: int, steps: int) -> float:
    """Train; return the median seconds of a step, without the first two."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["train.eval_batches=0", "checkpoint.every=0"]
        run = [f"run_dir={folder}/run", f"train.steps={steps}", "train.log_every=1"]
        command = [COMMAND, "train", *overrides, *layout, f"launch.nproc={ranks}", *quiet, *run]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ran.stdout}{ran.stderr}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(float(json.loads(line)["step_s"]) for line in lines[2:])


def every_layout(overrides: list[str], *, ranks: int) -> list[Layout]:
    """Return the settings of every layout that recomputes nothing."""
    config = load([*overrides, f"launch.nproc={ranks}"])
    choices = candidates(config, devices=ranks, in_node=ranks, fixed=_NONE)
    return [tuple(f"{k}={plain(v)}" for k, v in choice.settings.items()) for choice in choices]


def planned(overrides: list[str], *, ranks: int) -> tuple[Layout, dict[str, Any]]:
    """Return the first choice with all its settings, and the output of the command."""
    command = [COMMAND, "plan", "--json", "--devices", str(ranks), *overrides, "hardware=cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    plan: dict[str, Any] = json.loads(ran.stdout)
    config = load([*overrides, *plan["candidates"][0]["overrides"]])
    for choice in candidates(config, devices=ranks, in_node=ranks, fixed={}):
        if with_values(choice.config, {"hardware": None}) == config:
            return tuple(f"{k}={plain(v)}" for k, v in choice.settings.items()), plan
    raise SystemExit(f"no layout is {plan['candidates'][0]['overrides']}")


def short(layout: Layout) -> str:
    """Describe a layout by its unusual settings."""
    usual = ("degree=1", "=false", "=none", "schedule=1f1b")
    unusual = [word for word in layout if not word.endswith(usual)]
    return " ".join(unusual) or "one rank"


def main() -> None:
    """For each number of ranks, print the finalists and the ratio of the planned to the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="overrides of the run")
    args = parser.parse_args()
    for ranks in args.ranks:
        first, reported = planned(args.overrides, ranks=ranks)
        once = {
            layout: step_seconds(args.overrides, layout, ranks=ranks, steps=8)
            for layout in every_layout(args.overrides, ranks=ranks)
        }
        best = sorted(once, key=lambda layout: once[layout])[:FINALISTS]
        finalists = list(dict.fromkeys([first, *best]))
        times: dict[Layout, list[float]] = {layout: [] for layout in finalists}
        for _ in range(args.repeats):
            for layout in finalists:
                seconds = step_seconds(args.overrides, layout, ranks=ranks, steps=args.steps)
                times[layout].append(seconds)
        medians = {layout: statistics.median(turns) for layout, turns in times.items()}
        print(f"\n{ranks} ranks, {len(once)} layouts run, planned in {reported['seconds']} s")
        for layout in sorted(medians, key=lambda layout: medians[layout]):
            mark = "planned" if layout == first else ""
            print(f"{medians[layout] * 1e3:8.1f} ms  {mark:<8} {short(layout)}")
        estimated = reported["candidates"][0]["step_s"]
        print(
            f"planned over best {medians[first] / min(medians.values()):.2f}, "
            f"its step estimated {estimated / medians[first]:.2f} of the measured"
        )


if __name__ == "__main__":
    main()
