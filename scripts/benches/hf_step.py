"""Times a training step of ``model=hf``, of the built-in ``llama``, and of a hand-written loop.

All train one Llama under fully_shard: ``model=hf`` with its class of transformers, as the loop
under torchrun does, ``llama`` with axonlaunch's modules. They take turns, and the order changes
from round to round.
"""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial
from pathlib import Path

from contest import Work, axonlaunch, step_seconds, torchrun

SCRIPT = Path(__file__).with_name("hf_torchrun_train.py")
WORKLOADS = {
    "large": partial(Work, batch=16, hidden=256, layers=4, length=128, log_every=10),
    "small": partial(Work, batch=8, hidden=256, layers=6, length=128, log_every=10),
}


def sizes(work: Work) -> dict[str, int]:
    """Return the sizes of the Llama, by their names in ``config.json``."""
    return {
        "vocab_size": 256,
        "hidden_size": work.hidden,
        "intermediate_size": 4 * work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": work.length,
    }


def hf(work: Work) -> list[str]:
    """Return overrides of the model as a class of transformers."""
    figures = ", ".join(f"{key}: {value}" for key, value in sizes(work).items())
    config = f"model.config={{model_type: llama, {figures}}}"
    return ["model=hf", "model.init=random", config, "train.prove=never"]


def own(work: Work) -> list[str]:
    """Return overrides of the built-in model."""
    figures = [f"model.{key}={value}" for key, value in sizes(work).items()]
    return ["model=llama_debug", *figures, "model.tie_word_embeddings=false"]


def main() -> None:
    """Print the medians, and the ratios of axonlaunch to the loop written by hand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'workload':>8}  {'by hand':>10}  {'model=hf':>10}  {'ratio':>6}  {'llama':>10}  ratio")
    for workload in args.workloads:
        work = WORKLOADS[workload]("fsdp", args.ranks, args.steps)
        contestants = {
            "by hand": partial(torchrun, script=SCRIPT),
            "model=hf": partial(axonlaunch, model=hf(work)),
            "llama": partial(axonlaunch, model=own(work)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(args.repeats):
            order = list(contestants.items())
            for name, start in reversed(order) if turn % 2 else order:
                with start(work) as contestant:
                    contestant.first_step_s()
                    seconds[name].append(step_seconds(contestant))
        by_hand, *others = seconds.values()
        print(f"{workload:>8}  {statistics.median(by_hand) * 1e3:>7.1f} ms", end="")
        for each in others:
            ratio = statistics.median(a / b for a, b in zip(each, by_hand, strict=True))
            print(f"  {statistics.median(each) * 1e3:>7.1f} ms  {ratio:>6.3f}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
