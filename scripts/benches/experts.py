"""Times training steps of mixtures with and without divided experts, and of a hand-written loop.

The loop uses transformers' Qwen3-MoE with its own expert plan and ``fully_shard``; ``model=hf``
trains the same model with divided experts (``hf``) and without (``hf whole``), and ``moe_debug`` is
included in axonlaunch. They take turns, and the order changes from round to round.
"""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial
from pathlib import Path

from contest import Work, axonlaunch, step_seconds, torchrun

SCRIPT = Path(__file__).with_name("experts_torchrun_train.py")
RATIOS = {
    "hf / by hand": ("hf", "by hand"),
    "hf / hf whole": ("hf", "hf whole"),
    "moe / moe whole": ("moe", "moe whole"),
}


def hf(work: Work) -> list[str]:
    """Return overrides of the model that ``experts_torchrun_train`` trains."""
    sizes = {
        "model_type": "qwen3_moe",
        "vocab_size": 256,
        "hidden_size": work.hidden,
        "moe_intermediate_size": work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": work.hidden // 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": "true",
        "max_position_embeddings": work.length,
    }
    config = ", ".join(f"{key}: {value}" for key, value in sizes.items())
    return ["model=hf", "model.init=random", f"model.config={{{config}}}", "train.prove=never"]


def moe(work: Work) -> list[str]:
    """Return overrides of the included mixture."""
    sizes = {
        "hidden_size": work.hidden,
        "moe_intermediate_size": work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": 4,
    }
    return ["model=moe_debug", *(f"model.{key}={value}" for key, value in sizes.items())]


def main() -> None:
    """Print the medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    work = Work(
        "fsdp", args.ranks, args.steps, batch=16, hidden=256, layers=4, length=128, log_every=10
    )
    divided = f"strategy.expert.degree={args.ranks}"
    contestants = {
        "by hand": partial(torchrun, script=SCRIPT),
        "hf": partial(axonlaunch, model=[*hf(work), divided]),
        "hf whole": partial(axonlaunch, model=hf(work)),
        "moe": partial(axonlaunch, model=[*moe(work), divided]),
        "moe whole": partial(axonlaunch, model=moe(work)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(args.repeats):
        order = list(contestants.items())
        for name, start in reversed(order) if turn % 2 else order:
            with start(work) as contestant:
                contestant.first_step_s()
                seconds[name].append(step_seconds(contestant))
    for name, each in seconds.items():
        print(f"{name:>15}  {statistics.median(each) * 1e3:>7.1f} ms")
    for name, (one, other) in RATIOS.items():
        pairs = zip(seconds[one], seconds[other], strict=True)
        print(f"{name:>15}  {statistics.median(a / b for a, b in pairs):>7.3f}", flush=True)


if __name__ == "__main__":
    main()
