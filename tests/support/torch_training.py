"""Trains one small model with plain torch, in every kind of parallelism that torch has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from axonlaunch import comm
from axonlaunch.comm import World

WIDTH, BATCH, STEPS, NUM_BLOCKS = 16, 16, 3, 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(dropout) for _ in range(NUM_BLOCKS)])


def make_batch(part: int = 0, num_parts: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(2, BATCH, 4, WIDTH, generator=generator)
    return both[0].chunk(num_parts)[part], both[1].chunk(num_parts)[part]


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    # Not Adam: it divides by the gradient's magnitude, which amplifies rounding of small gradients.
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, foreach=False)


def train(model: nn.Module, batch: tuple[Tensor, Tensor], *, steps: int = STEPS) -> Tensor:
    optimizer = make_optimizer(model)
    return torch.stack([step(model, optimizer, batch) for _ in range(steps)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    loss = F.mse_loss(model(batch[0]).float(), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def full_tensor(parameter: Tensor) -> Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (full() if full else parameter).detach().clone()


def weights(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter) for parameter in model.parameters()]


def mean_loss(losses: Tensor) -> Tensor:
    return comm.all_reduce_mean(losses)


def train_ddp(world: World) -> tuple[Tensor, list[Tensor]]:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)
    losses = train(model, make_batch(world.rank, world.world_size))
    return mean_loss(losses), weights(model)


def train_ddp_with_gradients_in_buckets(world: World) -> tuple[Tensor, list[Tensor]]:
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, static_graph=True)
    losses = train(model, make_batch(world.rank, world.world_size))
    return mean_loss(losses), weights(model)


def train_by_sync_gradients(world: World) -> tuple[Tensor, list[Tensor]]:
    model = make_model()
    optimizer, batch = make_optimizer(model), make_batch(world.rank, world.world_size)
    losses = []
    for _ in range(STEPS):
        losses.append(F.mse_loss(model(batch[0]).float(), batch[1]))
        losses[-1].backward()
        comm.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return mean_loss(torch.stack(losses).detach()), weights(model)


def shard(model: nn.Sequential, mesh: DeviceMesh, **policy: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def train_fsdp(world: World, **policy: Any) -> tuple[Tensor, list[Tensor]]:
    model = shard(make_model(), init_device_mesh("cpu", (world.world_size,)), **policy)
    losses = train(model, make_batch(world.rank, world.world_size))
    return mean_loss(losses), weights(model)


def train_hsdp(world: World) -> tuple[Tensor, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, world.world_size // 2), mesh_dim_names=("dp", "shard"))
    model = shard(make_model(), mesh)
    losses = train(model, make_batch(world.rank, world.world_size))
    return mean_loss(losses), weights(model)


TENSOR_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def train_tensor(world: World) -> tuple[Tensor, list[Tensor]]:
    model, mesh = make_model(), init_device_mesh("cpu", (world.world_size,))
    for block in model:
        parallelize_module(block, mesh, TENSOR_PLAN)
    return train(model, make_batch()), weights(model)


def train_tensor_and_fsdp(world: World) -> tuple[Tensor, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, world.world_size // 2), mesh_dim_names=("shard", "tp"))
    model = make_model()
    for block in model:
        parallelize_module(block, mesh["tp"], TENSOR_PLAN)
    shard(model, mesh["shard"])
    losses = train(model, make_batch(mesh.get_local_rank("shard"), 2))
    return mean_loss(losses), weights(model)


def pipeline_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def train_pipeline(
    world: World, schedule_name: str, stages_per_rank: int
) -> tuple[Tensor | None, dict[int, list[Tensor]]]:
    size, rank = world.world_size, world.rank
    num_stages, blocks = size * stages_per_rank, make_model()
    indices = [rank + size * turn for turn in range(stages_per_rank)]
    if schedule_name == "ScheduleZBVZeroBubble":
        indices = [rank, num_stages - 1 - rank]
    each = NUM_BLOCKS // num_stages
    stages = [
        pipelining.PipelineStage(
            blocks[index * each : (index + 1) * each], index, num_stages, torch.device("cpu")
        )
        for index in indices
    ]
    make = getattr(pipelining, schedule_name)
    several = stages_per_rank > 1
    schedule = make(stages if several else stages[0], 8, loss_fn=pipeline_loss)
    optimizer = make_optimizer(nn.ModuleList(stage.submod for stage in stages))
    inputs, targets = make_batch()
    has_last = num_stages - 1 in indices
    curve = []
    for _ in range(STEPS):
        losses: list[Tensor] = []
        schedule.step(
            *([inputs] if rank == 0 else []),
            **({"target": targets, "losses": losses} if has_last else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        curve += [torch.stack(losses).mean().detach()] if losses else []
    by_stage = {index: weights(stage.submod) for index, stage in zip(indices, stages, strict=True)}
    return (torch.stack(curve) if curve else None), by_stage
