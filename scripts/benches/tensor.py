"""Times a tensor-parallel Llama block against torch's parallelize_module, with the same weights.

Forward and backward of ``models.llama.Block`` on 2 gloo ranks, each on a separate core, batch 2,
128 positions, fp32; outputs and gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import time

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from axonlaunch.comm import World, barrier
from axonlaunch.config.options.model import LlamaConfig
from axonlaunch.engines.tensor.parallelize import parallelize
from axonlaunch.models.architectures.llama import SPEC, LlamaBlock
from axonlaunch.models.modules.attention import RotaryTable

BATCH, LENGTH, RANKS = 2, 128, 2


def ours(block: LlamaBlock, mesh: DeviceMesh) -> LlamaBlock:
    """Divide a block by the plan of its model."""
    model = nn.Module()
    model.layers = nn.ModuleList([block])
    parallelize(model, SPEC.plan(model), mesh=mesh)
    return block


def theirs(block: LlamaBlock, mesh: DeviceMesh) -> LlamaBlock:
    """Divide a block as torch's tutorial does."""
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    plan = dict.fromkeys(columns, ColwiseParallel())
    parallelize_module(
        block,
        mesh,
        {**plan, "self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()},
    )
    return block


def contest(world: World, hidden: int, repeats: int) -> dict[str, list[float]]:
    """Time both in turn; return the seconds of each."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    config = LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=max(4, hidden // 64),
        num_key_value_heads=max(4, hidden // 64),
        intermediate_size=-(-hidden * 8 // 3 // 16) * 16,
    )
    torch.manual_seed(0)
    start = LlamaBlock(config)
    rotary = RotaryTable(hidden // config.num_attention_heads, max_positions=LENGTH, theta=1e4)
    x, upstream = torch.randn(2, BATCH, LENGTH, hidden).unbind()
    blocks = {
        "ours": ours(copy.deepcopy(start), mesh),
        "theirs": theirs(copy.deepcopy(start), mesh),
    }

    def step(block: LlamaBlock) -> Tensor:
        block.zero_grad()
        output: Tensor = block(x.requires_grad_(), rotary)
        output.backward(upstream)
        return output

    expected = step(start)
    for block in blocks.values():
        torch.testing.assert_close(step(block), expected, rtol=1e-4, atol=1e-4)
        for parameter, full in zip(block.parameters(), start.parameters(), strict=True):
            gradient = parameter.grad
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(gradient, full.grad, rtol=1e-3, atol=1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    gc.collect()
    gc.disable()
    for turn in range(repeats + repeats // 10):
        for name, block in blocks.items():
            barrier(group=world.default_group)
            started = time.perf_counter()
            step(block)
            if turn >= repeats // 10:
                seconds[name].append(time.perf_counter() - started)
    gc.enable()
    return seconds


def rank(number: int, port: int, sizes: list[int], repeats: int) -> None:
    """Run one of the ranks."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    torch.set_num_threads(1)
    with World.init(backend="gloo") as world:
        for hidden in sizes:
            seconds = contest(world, hidden, max(20, repeats * 64 // max(hidden, 64)))
            if number == 0:
                mine, other = (statistics.median(times) for times in seconds.values())
                ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
                print(
                    f"{hidden:>6}  {mine * 1e3:>9.2f} ms  {other * 1e3:>9.2f} ms  {ratio:>6.3f}",
                    flush=True,
                )
        barrier(group=world.default_group)
    # Skips the interpreter's teardown, in which torch sometimes aborts because of gloo's threads.
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument(
        "--repeats",
        type=int,
        default=400,
        help="repeats with hidden size 64; larger sizes have fewer",
    )
    parser.add_argument("--port", type=int, default=29631)
    args = parser.parse_args()
    print(f"{'hidden':>6}  {'ours':>12}  {'torch':>12}  {'ratio':>6}", flush=True)
    multiprocessing.spawn(rank, args=(args.port, args.hidden, args.repeats), nprocs=RANKS)
