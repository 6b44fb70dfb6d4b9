"""Times a training step against the hand-written torchrun script: same model, batch, AdamW.

Two workloads: ``large`` steps, and the ``small`` ones of a model of 4.9 million parameters with 512
tokens per rank, in which a launcher's overhead is visible. Contestants take turns, and the order
changes from round to round.
"""

import argparse
import statistics
from functools import partial

from contest import CONTESTANTS, Work, step_seconds

WORKLOADS = {
    "large": partial(Work, batch=16, hidden=256, layers=4, length=128, log_every=10),
    "small": partial(Work, batch=8, hidden=256, layers=6, length=128, log_every=10),
}
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--repeats", type=int, default=10)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
args = parser.parse_args()

print(f"{'workload':>8}  {'strategy':>8}  {'axonlaunch':>10}  {'torchrun':>10}  {'ratio':>6}")
for workload in args.workloads:
    for strategy in args.strategies:
        work = WORKLOADS[workload](strategy, args.ranks, args.steps)
        seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for turn in range(args.repeats):
            order = list(CONTESTANTS.items())
            for name, start in reversed(order) if turn % 2 else order:
                with start(work) as contestant:
                    contestant.first_step_s()
                    seconds[name].append(step_seconds(contestant))
        ours, theirs = (statistics.median(seconds[name]) for name in CONTESTANTS)
        ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(
            f"{workload:>8}  {strategy:>8}  {ours * 1e3:>7.1f} ms  {theirs * 1e3:>7.1f} ms  "
            f"{ratio:>6.3f}",
            flush=True,
        )
