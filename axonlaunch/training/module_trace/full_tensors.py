"""Collects all elements of traced tensors: each rank keeps its parts, and rank 0 gathers them.

Elements of a module are omitted if a rank's part of the full tensor is unknown, for example if the
module is called several times in a forward or is an expert. Its statistics are written anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.engines.tensor.parallel_layers.local_parameters import output_pieces
from axonlaunch.models.fake.output_regions import MicroBatchPlace, region
from axonlaunch.models.tensors.dtensor_regions import held_boxes
from axonlaunch.training.module_trace.hooks import TracedKey, on_host

_Part = tuple[tuple[Any, ...], Tensor]


class WholeTensors:
    """This rank's parts of the tensors of a step, on the host, in fp32."""

    def __init__(
        self, shapes: Mapping[TracedKey, Sequence[int]], layout: Layout, world: World
    ) -> None:
        """Begin a step.

        Args:
            shapes: Shapes of the full tensors to gather, the same on all ranks.
            layout: Layout of the run.
        """
        self._shapes, self._layout, self._world = shapes, layout, world
        self._parts: dict[TracedKey, dict[int, _Part]] = {}
        self._misplaced: set[TracedKey] = set()

    def add_parameter(self, key: TracedKey, tensor: Tensor) -> None:
        """Keep this rank's shards of a parameter or a gradient."""
        for number, (index, part) in enumerate(held_boxes(tensor)):
            self._parts.setdefault(key, {})[number] = index, on_host(part)

    def add_samples(self, key: TracedKey, rows: Tensor) -> None:
        """Keep this rank's rows of the global batch."""
        first = self._layout.data_shard(self._world.rank) * len(rows)
        self._parts[key] = {0: ((slice(first, first + len(rows)),), on_host(rows))}

    def add_call(self, key: TracedKey, tensor: Tensor, *, number: int, module: nn.Module) -> None:
        """Keep the output of a module for one micro-batch, or the gradient of that output.

        Only the first tensor for each micro-batch is kept.

        Args:
            key: Kind and name of the tensor.
            tensor: Output or gradient, a plain tensor.
            number: Number of the micro-batch on this rank.
            module: Module that returned the output.
        """
        shape = self._shapes.get(key)
        if shape is None or number in self._parts.get(key, {}):
            return
        of_samples = key[0] == "output gradient"
        origin = MicroBatchPlace(self._layout, self._world.rank, number)
        pieces = output_pieces(module)
        index = region(shape, tensor.shape, origin, pieces=pieces, of_samples=of_samples)
        if index is None or number >= self._layout.micro_batches:
            self._misplaced.add(key)
        else:
            self._parts.setdefault(key, {})[number] = index, on_host(tensor)

    def gather(self, factors: Mapping[str, float]) -> dict[TracedKey, Tensor]:
        """Return the full tensors on rank 0 and an empty dict elsewhere. All ranks call this.

        Elements held by several ranks are averaged. Elements held by no rank are NaN.

        Args:
            factors: Factor of the elements, by kind of tensor; 1 if missing.
        """
        keys = [*self._shapes]
        states = torch.tensor([[key in self._parts, key in self._misplaced] for key in keys])
        rank_counts = self._sum(states.float()).tolist()
        full: dict[TracedKey, Tensor] = {}
        for key, (holding, misplacing) in zip(keys, rank_counts, strict=True):
            if not holding or misplacing:
                continue
            total = torch.zeros(2, *self._shapes[key])
            for index, part in self._parts.pop(key, {}).values():
                total[0][index] += part
                total[1][index] += 1
            total, count = self._sum(total)
            if self._world.is_main:
                average = total / count.where(count > 0, math.nan)
                full[key] = average * factors.get(key[0], 1.0)
        return full

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._world.world_size == 1:
            return tensor
        on_device = tensor.to(self._world.device)
        dist.all_reduce(on_device)
        return on_device.cpu()
