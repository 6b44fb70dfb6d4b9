"""Times training steps of mixtures with and without divided experts, and of a hand-written loop.

The loop uses transformers' Qwen3-MoE with its own expert plan and ``fully_shard``. ``model=hf``
trains the same model with divided experts (``hf``) and without (``hf whole``); ``moe`` is the
mixture included in axonlaunch. All five take turns in the same two processes. Measured is the CPU
time of a rank, because wall time on a busy machine depends on the turn. At the end, a profile of
``hf`` shows what dispatch costs beside the products.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from configured import run_config
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from axonlaunch import data
from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World, barrier
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.problems.errors import plain
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine

RANKS, BATCH, LENGTH, HIDDEN, LAYERS = 2, 16, 128, 256, 4
QWEN3_MOE = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": HIDDEN // 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": LENGTH,
}
HF = [
    *("model=hf", "model.init=random", "train.prove=never"),
    f"model.config={plain({'model_type': 'qwen3_moe', **QWEN3_MOE})}",
]
MOE = [
    *("model=moe_debug", f"model.hidden_size={HIDDEN}", f"model.moe_intermediate_size={HIDDEN}"),
    *(f"model.num_hidden_layers={LAYERS}", "model.num_attention_heads=4"),
]
DIVIDED = f"strategy.expert.degree={RANKS}"
OURS = {"hf": [*HF, DIVIDED], "hf whole": HF, "moe": [*MOE, DIVIDED], "moe whole": MOE}
RATIOS = [("hf", "by hand"), ("hf", "hf whole"), ("moe", "moe whole")]
WARM_UP = 2
"""Steps of each program that are not counted."""
SHOWN = 12
"""Number of operations in the profile."""

Step = Callable[[], object]


def ours(world: World, overrides: list[str]) -> Step:
    """Return a training step of axonlaunch."""
    config = run_config(
        [
            *(*overrides, "strategy=fsdp", f"launch.nproc={RANKS}", "launch.backend=gloo"),
            *("data=synthetic_tokens", f"data.sequence_length={LENGTH}"),
            f"train.global_batch_size={BATCH}",
        ]
    )
    engine = build_engine(config, world)
    load_initial_weights(engine, config, world=world)
    dataset, layout = data.build_dataset(config.data), Layout.of(config, world_size=RANKS)
    batch = rank_loader(config, dataset, layout=layout, rank=world.rank).batch(0)
    return lambda: engine.train_step(batch).loss.item()


def by_hand(world: World, folder: Path) -> Step:
    """Return a training step that is written by hand."""
    if not world.rank:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE, use_cache=False)).save_pretrained(folder)
    barrier(group=world.default_group)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=RANKS, ep_size=RANKS),
    ).train()
    # torch updates and clips parameters of one mesh together.
    experts: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (experts if ".experts." in name else others).append(parameter)
    groups = [{"params": experts}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    tokens = torch.randint(0, 256, (BATCH // RANKS, LENGTH + 1))

    def step() -> float:
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        for group in (experts, others):
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def rank(number: int, port: int, folder: Path, repeats: int) -> None:
    """Run one of the ranks."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with World.init(backend="gloo") as world:
        steps = {"by hand": by_hand(world, folder)}
        steps |= {name: ours(world, overrides) for name, overrides in OURS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(WARM_UP + repeats):
            for name in reversed(steps) if turn % 2 else steps:
                barrier(group=world.default_group)
                begun = time.process_time()
                steps[name]()
                seconds[name].append(time.process_time() - begun)
        if not number:
            report({name: times[WARM_UP:] for name, times in seconds.items()})
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            steps["hf"]()
        if not number:
            operations = sorted(profiled.key_averages(), key=lambda e: -e.self_cpu_time_total)
            total = sum(event.self_cpu_time_total for event in operations)
            print("profile of hf, shares of wall time; wait_tensor waits for other ranks")
            for event in operations[:SHOWN]:
                print(f"{event.self_cpu_time_total / total:>7.1%} {event.count:>5}  {event.key}")
        barrier(group=world.default_group)
    os._exit(0)  # gloo's threads may abort the interpreter's teardown


def report(seconds: dict[str, list[float]]) -> None:
    """Print the medians and ratios."""
    for name, times in seconds.items():
        print(f"{name:>9}  {statistics.median(times) * 1e3:>7.1f} ms")
    for one, other in RATIOS:
        pairs = zip(seconds[one], seconds[other], strict=True)
        print(f"{one} / {other}: {statistics.median(a / b for a, b in pairs):.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--port", type=int, default=29632)
    chosen = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as place:
        arguments = (chosen.port, Path(place), chosen.repeats)
        multiprocessing.spawn(rank, args=arguments, nprocs=RANKS)
