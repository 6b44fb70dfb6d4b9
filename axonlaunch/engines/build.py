"""Builds the engine that a configuration asks for, in one fixed order.

Activation checkpointing, compile, then sharding or replication: each wraps what the one before
left, and none knows of the next.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, layout, replicas
from axonlaunch.engines.activation_checkpointing import apply_activation_checkpointing
from axonlaunch.engines.base import Engine
from axonlaunch.engines.data_parallel import DataParallelEngine
from axonlaunch.engines.ddp import DDP
from axonlaunch.engines.fsdp import FSDP, CPUOffload
from axonlaunch.engines.mesh import data_mesh
from axonlaunch.engines.offload import HOST, StreamedUpdate
from axonlaunch.engines.optimizer import learning_rate
from axonlaunch.engines.precision import sharded_policy
from axonlaunch.engines.update import Update
from axonlaunch.engines.zero1 import ShardedUpdate
from axonlaunch.models.build import construct, spec_for, start
from axonlaunch.models.spec import ModelSpec


def build(config: RunConfig, world: World) -> Engine:
    """Build a model, wrap it, fill it with its initial weights.

    Args:
        config: A checked configuration.
        world: Its ranks; all of them call this.
    """
    spec = spec_for(config.model)
    shares = layout(config, world_size=world.world_size)
    model = construct(config.model, seed=config.seed)
    blocks = list(spec.blocks(model).values())
    train = config.train
    apply_activation_checkpointing(blocks, mode=train.activation_checkpointing)
    if train.compile:
        for block in blocks or [model]:
            block.compile()
    parallel = _wrap(config, spec, model, blocks, world, shares)
    return DataParallelEngine(
        model,
        parallel=parallel,
        update=_update(config, model, parallel, world, shares),
        loss=spec.loss,
        world=world,
        layout=shares,
        precision=train.precision,
        grad_clip=train.grad_clip,
        seed=config.seed,
        rate=partial(_rate, config),
    )


def _wrap(
    config: RunConfig,
    spec: ModelSpec,
    model: nn.Module,
    blocks: list[nn.Module],
    world: World,
    shares: Layout,
) -> DDP | FSDP | None:
    if shares.data_parallel == "fsdp":
        fsdp = config.strategy.fsdp
        hybrid = fsdp.sharding == "hybrid_shard"
        parallel = FSDP(
            model,
            world=world,
            layers=blocks,
            sharding=fsdp.sharding,
            cpu_offload=fsdp.cpu_offload,
            replicate=replicas(config, world_size=world.world_size) if hybrid else 1,
            mixed_precision=sharded_policy(config.train.precision),
        )
        on_host = parallel.cpu_offload.keeps_parameters_on_host
        _fill(config, spec, model, parameters_on=HOST if on_host else world.device, world=world)
        return parallel
    _fill(config, spec, model, parameters_on=world.device, world=world)
    if shares.data_parallel == "none":
        return None
    ddp = config.strategy.ddp
    return DDP(
        model,
        group=world.default_group,
        sync=ddp.sync,
        bucket_size_mb=ddp.bucket_size_mb,
        broadcast_buffers=ddp.broadcast_buffers,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
    )


def _fill(
    config: RunConfig,
    spec: ModelSpec,
    model: nn.Module,
    *,
    parameters_on: torch.device,
    world: World,
) -> None:
    """Put a model on its device and give it its initial weights."""
    if spec.initializers is None and config.strategy.data_parallel == "fsdp":
        return  # fully_shard has moved what the model filled itself
    start(model, config.model, seed=config.seed, device=parameters_on)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))


def _update(
    config: RunConfig, model: nn.Module, parallel: DDP | FSDP | None, world: World, shares: Layout
) -> Update:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if shares.data_parallel == "zero1":
        mesh = data_mesh(world, replicate=1, shard=world.world_size)
        return ShardedUpdate(config.optimizer, trained, mesh=mesh)
    if isinstance(parallel, FSDP):
        if parallel.cpu_offload is CPUOffload.PARAMS:
            return StreamedUpdate(
                config.optimizer, trained, device=world.device, states_on=world.device
            )
        if parallel.cpu_offload is CPUOffload.OPTIMIZER_STATES:
            return StreamedUpdate(config.optimizer, trained, device=world.device, states_on=HOST)
    return Update(config.optimizer, trained)


def _rate(config: RunConfig, step: int) -> float:
    return learning_rate(
        config.scheduler, peak=config.optimizer.lr, step=step, steps=config.train.steps
    )
