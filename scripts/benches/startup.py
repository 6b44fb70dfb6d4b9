"""Seconds from the command to the first step, and memory of a rank, compared with torchrun."""

import argparse
import compileall
import statistics
from pathlib import Path

from contest import CONTESTANTS, Work

import axonlaunch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
parser.add_argument("--repeats", type=int, default=3)
args = parser.parse_args()
# pip compiles packages that it installs. An editable package is compiled at every start if the
# environment forbids Python to write bytecode.
compileall.compile_dir(Path(axonlaunch.__file__).parent, quiet=1)

print(f"{'ranks':>5}  {'axonlaunch':>10}  {'torchrun':>10}  {'ratio':>6}   PSS of a rank, MiB")
for ranks in args.ranks:
    work = Work(
        "fsdp", ranks, steps=100_000, batch=ranks, hidden=64, layers=2, length=32, log_every=10
    )
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    memory: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(args.repeats):
        for name, start in CONTESTANTS.items():
            with start(work) as contestant:
                seconds[name].append(contestant.first_step_s())
                memory[name].append(contestant.rank_pss_mib())
    ours, theirs = (statistics.median(seconds[name]) for name in CONTESTANTS)
    pss = [statistics.median(memory[name]) for name in CONTESTANTS]
    print(
        f"{ranks:>5}  {ours:>8.2f} s  {theirs:>8.2f} s  {ours / theirs:>6.2f}   "
        f"{pss[0]:.0f} beside {pss[1]:.0f}",
        flush=True,
    )
