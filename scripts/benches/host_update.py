"""The host's update (``strategy.fsdp.cpu_offload=full``) compared with torch's fused AdamW.

Both clip the gradients and update the same numbers on all cores, and take turns. Torch scales the
gradients while it clips, ours during the update. Prints seconds, and the speed relative to torch:
above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config.optimization.optimizer import AdamWConfig
from axonlaunch.engines.optimizer.step import Update

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--width", type=int, default=2048, help="rows and columns of a matrix")
parser.add_argument("--matrices", type=int, default=16)
parser.add_argument("--rounds", type=int, default=15)
args = parser.parse_args()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.matrices)))


@dataclass(frozen=True)
class Program:
    """Parameters in host memory, and the two parts of their step."""

    parameters: Sequence[Tensor]
    clip: Callable[[], object]
    update: Callable[[], object]


def offloaded(world: World) -> Program:
    sharded = ax.FSDP(model(), world=world, cpu_offload="full")
    named = dict(sharded.module.named_parameters())
    update = Update(AdamWConfig(), named)
    return Program(
        [*named.values()],
        lambda: update.clip_gradients(1.0),
        lambda: update.apply(rate=lambda peak: peak),
    )


def plain() -> Program:
    parameters, options = [*model().parameters()], AdamWConfig()
    matrices, vectors = (
        [p for p in parameters if (p.ndim > 1) is large] for large in (True, False)
    )
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        fused=True,
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Program(parameters, lambda: nn.utils.clip_grad_norm_(parameters, 1.0), update)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def compare(world: World) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    programs = {"axonlaunch": offloaded(world), "torch": plain()}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in programs}
    for number in range(args.rounds + 1):
        for name in programs if number % 2 else reversed(programs):
            program = programs[name]
            for parameter in program.parameters:
                parameter.grad = torch.full_like(parameter.detach(), 1e-3)
            clipping, update = seconds(program.clip), seconds(program.update)
            if number:  # the first round creates the states
                times[name].append((clipping, update, clipping + update))
    for ours, theirs in zip(*(each.parameters for each in programs.values()), strict=True):
        assert torch.allclose(local_part(ours), theirs, rtol=1e-6, atol=1e-7), "updates differ"
    elements = sum(parameter.numel() for parameter in programs["torch"].parameters)
    print(f"{elements / 1e6:.0f} million parameters, {torch.get_num_threads()} threads")
    for part, label in enumerate(("clipping", "update", "both")):
        ours, theirs = ([each[part] for each in times[name]] for name in programs)
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        medians = statistics.median(ours), statistics.median(theirs)
        print(f"{label:>10} {medians[0]:.3f} s, torch {medians[1]:.3f} s: speed {ratio:.3f}")


if __name__ == "__main__":
    ax.World.mock(1, timeout_s=3600).run(compare)
