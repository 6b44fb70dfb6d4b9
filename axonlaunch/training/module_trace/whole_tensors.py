"""All elements of what a step computed: each rank keeps its parts, and rank 0 gets the whole.

A module is left out where it is not known what part of the whole a rank has, as where it is called
several times in a forward, or experts share tokens: its statistics are written in any case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config.layout import Layout
from axonlaunch.models.dtensor_regions import held_boxes
from axonlaunch.models.output_regions import MicroBatchPlace, pieces_of, region
from axonlaunch.training.module_trace.hooks import TracedKey, on_host

_Part = tuple[tuple[Any, ...], Tensor]


class WholeTensors:
    """The parts of a step's tensors that this rank has seen, on the host, in fp32."""

    def __init__(
        self, shapes: Mapping[TracedKey, Sequence[int]], layout: Layout, world: World
    ) -> None:
        """Begin a step.

        Args:
            shapes: Of the whole tensors that are put together; the same on all ranks.
            layout: Of the ranks.
            world: The ranks.
        """
        self._shapes, self._layout, self._world = shapes, layout, world
        self._parts: dict[TracedKey, dict[int, _Part]] = {}
        self._misplaced: set[TracedKey] = set()

    def add_parameter(self, key: TracedKey, tensor: Tensor) -> None:
        """Keep what this rank holds of a parameter or a gradient."""
        for number, (index, part) in enumerate(held_boxes(tensor)):
            self._parts.setdefault(key, {})[number] = index, on_host(part)

    def add_samples(self, key: TracedKey, rows: Tensor) -> None:
        """Keep what this rank is given of a global batch."""
        first = self._layout.data_shard(self._world.rank) * len(rows)
        self._parts[key] = {0: ((slice(first, first + len(rows)),), on_host(rows))}

    def add_call(self, key: TracedKey, tensor: Tensor, *, number: int, module: nn.Module) -> None:
        """Keep what a micro-batch gives: an output, or its gradient, of which the first counts.

        Args:
            key: Whose it is.
            tensor: Plain.
            number: Which of the rank's micro-batches.
            module: That returned it.
        """
        shape = self._shapes.get(key)
        if shape is None or number in self._parts.get(key, {}):
            return
        of_samples = key[0] == "output gradient"
        place, pieces = MicroBatchPlace(self._layout, self._world.rank, number), pieces_of(module)
        index = region(shape, tensor.shape, place, pieces=pieces, of_samples=of_samples)
        if index is None or number >= self._layout.micro_batches:
            self._misplaced.add(key)
        else:
            self._parts.setdefault(key, {})[number] = index, on_host(tensor)

    def gather(self, factors: Mapping[str, float]) -> dict[TracedKey, Tensor]:
        """Return the whole tensors on rank 0, none elsewhere; all ranks call this.

        Of elements that several ranks hold the mean is returned, of those that none has NaN.

        Args:
            factors: By kind: what elements are multiplied by.
        """
        keys = [*self._shapes]
        seen = torch.tensor([[key in self._parts, key in self._misplaced] for key in keys])
        ranks_of = self._sum(seen.float()).tolist()
        whole: dict[TracedKey, Tensor] = {}
        for key, (holding, misplacing) in zip(keys, ranks_of, strict=True):
            if not holding or misplacing:
                continue
            total = torch.zeros(2, *self._shapes[key])
            for index, part in self._parts.pop(key, {}).values():
                total[0][index] += part
                total[1][index] += 1
            total, count = self._sum(total)
            if self._world.is_main:
                average = total / count.where(count > 0, math.nan)
                whole[key] = average * factors.get(key[0], 1.0)
        return whole

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._world.world_size == 1:
            return tensor
        on_device = tensor.to(self._world.device)
        dist.all_reduce(on_device)
        return on_device.cpu()
