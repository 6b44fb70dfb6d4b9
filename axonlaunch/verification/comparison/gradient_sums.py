"""Checks that gradients are summed over micro-batches and ranks in the run's format.

In 16 bits, the rounding of products is as large as that of a sum in 16 bits, so a comparison with
one process cannot show such a sum. But gradients are additive: that of a batch is the mean of
those of its two halves. If the halves are complete micro-batches, each is computed by the same
operations alone and together, and factors of two are exact. Only the sums differ, by 1e-7 in fp32
and by 2e-3 in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.axes import DP_SHARD
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.data.datasets.dataset import IGNORE_INDEX, AnyBatch, Batch
from axonlaunch.engines.engine import Engine
from axonlaunch.models.build import spec_for
from axonlaunch.verification.references.differences import Difference


def hides_rounded_sums(config: RunConfig) -> bool:
    """Return whether rounding of products hides a sum in 16 bits that should be one in fp32.

    On GPUs, products of the same numbers may round differently each time.

    Args:
        config: Configuration of the layout.
    """
    precision = precision_of(config)
    sums_in_fp32 = not precision.reduce.is_low and not precision.gradients.is_low
    is_repeatable = config.launch.device != "cuda" and not config.train.compile
    is_additive = config.train.loss is None and spec_for(config).mixes_samples == "none"
    return precision.compute.is_low and sums_in_fp32 and is_repeatable and is_additive


def sum_differences(
    engine: Engine, batch: AnyBatch, config: RunConfig, *, rank: int
) -> Iterator[Difference]:
    """Compare the gradient of a batch with the mean of the gradients of its halves.

    Every rank must call this. The engine's gradients are lost, its parameters are not changed.

    Args:
        engine: Engine of this rank.
        batch: This rank's part of a global batch.
        config: Configuration of the layout.
        rank: Rank of the engine.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    if not isinstance(batch, Batch) or batch.targets.is_floating_point():
        return
    if (halves := _halves(layout, rank, len(batch))) is None:
        return
    # With the same number of targets in each half, the losses of a half are exactly doubled.
    counted = batch.targets.masked_fill(batch.targets == IGNORE_INDEX, 0)
    masks = torch.ones_like(halves), halves, ~halves
    both, *of_halves = (
        _gradients(engine, replace(batch, targets=_mask(counted, rows))) for rows in masks
    )
    for name, gradient in both.items():
        first, second = (gradients[name].double() / 2 for gradients in of_halves)
        size = float(first.norm() + second.norm())
        distance = float((gradient.double() - first - second).norm())
        if math.isfinite(distance) and size:  # fp16 may overflow
            yield Difference(1, "sum", name, distance / size, count=gradient.numel(), rank=rank)


def _halves(layout: Layout, rank: int, rows: int) -> Tensor | None:
    """Return for each row whether it is in the first half; None if there are no equal halves.

    The halves alternate over micro-batches and over data-parallel ranks, except over ranks that
    share experts, which compute the products of their rows together.
    """
    inner = layout.stride(DP_SHARD)
    per_group = math.lcm(layout.expert, inner) // inner
    groups = layout.data_ranks // per_group
    if layout.micro_batches % 2 and groups % 2:
        return None
    micro_batches = torch.arange(rows) // layout.micro_batch_size
    group = layout.data_shard(rank) // per_group
    return (micro_batches + group) % 2 == 0


def _mask(targets: Tensor, rows: Tensor) -> Tensor:
    """Return targets of which only some rows are counted."""
    counted = rows.to(targets.device).view(-1, *[1] * (targets.ndim - 1))
    return targets.masked_fill(~counted, IGNORE_INDEX)


def _gradients(engine: Engine, batch: Batch) -> dict[str, Tensor]:
    """Return this rank's parts of the gradients of a batch, and free those of the engine.

    Buffers that a forward changes, such as running statistics, get their values back.
    """
    buffers = [(each, each.clone()) for module in engine.modules for each in module.buffers()]
    engine.backward(batch)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    gradients = {}
    for name, updated in engine.named_updated():
        if updated.grad is not None:
            gradients[name] = local_part(updated.grad).cpu().clone()
    engine.forget_gradients()
    return gradients
