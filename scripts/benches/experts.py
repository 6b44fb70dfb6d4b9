"""Times training steps of mixtures with and without divided experts, and of a hand-written loop.

The loop uses transformers' Qwen3-MoE with its own expert plan and ``fully_shard``. ``model=hf``
trains the same model with divided experts (``hf``) and without (``hf whole``); ``moe`` is the
mixture included in axonlaunch. All five take turns in the same two processes. Programs that are
compared have the same weights, tokens, optimizer and limit of the norm, and sum their loss over the
ranks. Their losses must be equal in every step. Measured is the wall time of a step between
barriers. At the end, a profile of ``hf`` shows what dispatch costs beside the products.
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
from support.configured import run_config
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from axonlaunch import data
from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World, barrier
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import Batch
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
    "router_aux_loss_coef": 0.0,
}
HF = ["model=hf", "train.prove=never"]
MOE = [
    *("model=moe_debug", f"model.hidden_size={HIDDEN}", f"model.moe_intermediate_size={HIDDEN}"),
    *(f"model.num_hidden_layers={LAYERS}", "model.num_attention_heads=4"),
]
DIVIDED = f"strategy.expert.degree={RANKS}"
OURS = {"hf": [*HF, DIVIDED], "hf whole": HF, "moe": [*MOE, DIVIDED], "moe whole": MOE}
RATE, BETAS, NORM = 1e-3, (0.9, 0.95), 1.0
UPDATE = [f"optimizer.lr={RATE}", f"optimizer.betas={list(BETAS)}", "optimizer.weight_decay=0"]
UPDATE += ["scheduler=constant", "scheduler.warmup_steps=0"]
RATIOS = [("hf", "by hand"), ("hf", "hf whole"), ("moe", "moe whole")]
WARM_UP = 2
"""Steps of each program that are not counted."""
TOLERANCE = 1e-4
"""Largest relative difference between the losses of compared programs in a step."""
SHOWN = 12
"""Number of operations in the profile."""

Step = Callable[[], float]


def config_of(overrides: list[str], folder: Path) -> RunConfig:
    """Return a run's configuration; ``folder`` has the weights of transformers' model."""
    overrides = [*overrides, *([f"model.path={folder}"] if "model=hf" in overrides else [])]
    return run_config(
        [
            *(*overrides, "strategy=fsdp", f"launch.nproc={RANKS}", "launch.backend=gloo"),
            *("data=synthetic_tokens", f"data.sequence_length={LENGTH}", *UPDATE),
            *(f"train.global_batch_size={BATCH}", f"train.grad_clip={NORM}"),
        ]
    )


def batch_of(world: World, config: RunConfig) -> Batch:
    """Return this rank's part of the first global batch."""
    dataset, layout = data.build_dataset(config.data), Layout.of(config, world_size=RANKS)
    batch = rank_loader(config, dataset, layout=layout, rank=world.rank).batch(0)
    assert isinstance(batch, Batch)
    return batch


def ours(world: World, config: RunConfig) -> Step:
    """Return a training step of axonlaunch."""
    engine, batch = build_engine(config, world), batch_of(world, config)
    load_initial_weights(engine, config, world=world)
    return lambda: float(engine.train_step(batch).loss)


def by_hand(folder: Path, batch: Batch) -> Step:
    """Return a training step that is written by hand."""
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
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, weight_decay=0, fused=True)

    def step() -> float:
        logits = model(input_ids=batch.inputs).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
        loss.backward()
        norms = [norm_of(group) for group in (experts, others)]
        for group in (experts, others):
            torch.nn.utils.clip_grads_with_norm_(group, NORM, torch.stack(norms).norm())
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / RANKS
        distributed.all_reduce(total)
        return float(total)

    return step


def norm_of(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return the norm of the gradients of all ranks."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def rank(number: int, port: int, folder: Path, repeats: int) -> None:
    """Run one of the ranks."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with World.init(backend="gloo") as world:
        if not number:
            torch.manual_seed(0)
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE, use_cache=False))
            model.save_pretrained(folder)
        barrier(group=world.default_group)
        configs = {name: config_of(overrides, folder) for name, overrides in OURS.items()}
        steps = {"by hand": by_hand(folder, batch_of(world, configs["hf"]))}
        steps |= {name: ours(world, config) for name, config in configs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(WARM_UP + repeats):
            losses = {}
            for name in reversed(steps) if turn % 2 else steps:
                barrier(group=world.default_group)
                begun = time.perf_counter()
                losses[name] = steps[name]()
                barrier(group=world.default_group)
                seconds[name].append(time.perf_counter() - begun)
            for one, other in RATIOS:
                off = abs(losses[one] - losses[other]) / losses[other]
                assert off < TOLERANCE, f"turn {turn}: {one} and {other} differ: {losses}"
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
