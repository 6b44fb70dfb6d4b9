"""Measures the cost of a step with statistics of ``train.trace``, relative to an untraced step.

Both are steps of one run of one rank, in turns. A ratio is the median over pairs of consecutive
steps, in CPU time, which is least affected by the machine's load, and in wall-clock time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from tempfile import TemporaryDirectory

import torch
from support.configured import run_config
from support.rank_engine import rank_engine

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.training.module_trace.run import RunTracer


def configured(args: argparse.Namespace, *, hidden: int) -> RunConfig:
    """Return a run of one rank that traces every other step."""
    steps = 2 * args.rounds + args.warm_up
    return run_config(
        [
            *("strategy=single", "launch.nproc=1", "launch.backend=mock", "checkpoint.every=0"),
            *(f"model={args.model}", f"model.hidden_size={hidden}"),
            f"model.num_hidden_layers={args.layers}",
            f"data.sequence_length={args.length}",
            *(f"train.global_batch_size={args.batch}", f"train.steps={steps}"),
            f"train.precision={args.precision}",
            f"train.trace.steps={[*range(args.warm_up, steps, 2)]}".replace(" ", ""),
            f"train.trace.tensors={args.tensors}",
        ]
    )


def seconds_of_steps(config: RunConfig, world: World) -> tuple[int, list[tuple[float, float]]]:
    """Return the number of parameters, and the CPU time and the wall-clock time of each step."""
    engine, loader = rank_engine(config, world)
    tracer = RunTracer(config, engine, world=world, sample=sample_inputs(loader.dataset))
    taken = []
    for step in range(config.train.num_steps):
        batch = loader.batch(step)
        cpu, began = time.process_time(), time.perf_counter()
        tracer.backward(batch)
        engine.update()
        taken.append((time.process_time() - cpu, time.perf_counter() - began))
    return engine.num_parameters, taken


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="gpt", choices=["gpt", "llama_debug"])
parser.add_argument("--hidden", type=int, nargs="+", default=[256, 384, 512])
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
parser.add_argument("--tensors", default="norms", choices=["norms", "full"])
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--warm-up", type=int, default=3)
args = parser.parse_args()

torch.set_num_threads(args.threads)
print(f"{args.batch} x {args.length} tokens, {args.precision}, {args.threads} threads")
print(f"{'parameters':>12}  {'CPU time':>9}  {'traced':>9}  {'ratio':>6}  {'of time':>7}")
for hidden in args.hidden:
    with TemporaryDirectory() as folder, World.init() as world:
        config = dataclasses.replace(configured(args, hidden=hidden), run_dir=folder)
        parameters, taken = seconds_of_steps(config, world)
    traced, other = taken[args.warm_up :: 2], taken[args.warm_up + 1 :: 2]
    medians = [statistics.median(cpu for cpu, _ in side) for side in (other, traced)]
    pairs = [*zip(traced, other, strict=True)]
    ratios = [statistics.median(first[kind] / two[kind] for first, two in pairs) for kind in (0, 1)]
    print(
        f"{parameters:>12,}  {medians[0] * 1e3:>6.1f} ms  {medians[1] * 1e3:>6.1f} ms  "
        f"{ratios[0]:>6.3f}  {ratios[1]:>7.3f}",
        flush=True,
    )
