"""Seconds of a training step beside the hand-written torchrun script: same model, batch, AdamW."""

import argparse
import statistics

from contest import CONTESTANTS, Work, step_seconds

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ranks", type=int, nargs="+", default=[2])
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

print(f"{'strategy':>8}  {'ranks':>5}  {'axonlaunch':>10}  {'torchrun':>10}  {'ratio':>6}")
for strategy in ("ddp", "fsdp"):
    for ranks in args.ranks:
        work = Work(
            strategy, ranks, args.steps, batch=16, hidden=256, layers=4, length=128, log_every=10
        )
        seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for _ in range(args.repeats):
            for name, start in CONTESTANTS.items():
                with start(work) as contestant:
                    contestant.first_step_s()
                    seconds[name].append(step_seconds(contestant))
        ours, theirs = (statistics.median(seconds[name]) for name in CONTESTANTS)
        ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(
            f"{strategy:>8}  {ranks:>5}  {ours * 1e3:>7.1f} ms  {theirs * 1e3:>7.1f} ms  "
            f"{ratio:>6.3f}",
            flush=True,
        )
