"""Planners of torch.distributed.checkpoint for ranks that hold several boxes of a tensor.

A box is a rectangular region of the full tensor (``dtensor_regions.Box``). Torch assumes that a
rank holds one box of a tensor and that all boxes are equal. Packed weights, such as gate and up
projections in one parameter, are sharded piece by piece, and a vocabulary may be sharded unevenly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from axonlaunch.models.tensors.dtensor_regions import Box, local_boxes, needs_boxes


class WritesBoxes(DefaultSavePlanner):
    """Save planner that writes each of this rank's boxes of a tensor as a separate chunk."""

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank writes."""
        plan, boxed = super().create_local_plan(), _boxes_of(self.state_dict)
        items = [item for item in plan.items if item.index.fqn not in boxed]
        items += [item for key, tensor in boxed.items() for item in _writes(key, tensor)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor that an item of the plan writes."""
        box = _box_of(self.state_dict.get(index.fqn), index)
        return super().lookup_object(index) if box is None else box


class ReadsBoxes(DefaultLoadPlanner):
    """Load planner that reads each box of a tensor on this rank separately."""

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads."""
        assert self.metadata is not None
        plan, boxed = super().create_local_plan(), _boxes_of(self.state_dict)
        items = [item for item in plan.items if item.dest_index.fqn not in boxed]
        for key, tensor in boxed.items():
            saved: Any = self.metadata.state_dict_metadata[key]
            chunks = [_chunk(box) for box in local_boxes(tensor)]
            items += create_read_items_for_chunk_list(key, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that an item of the plan fills."""
        box = _box_of(self.state_dict.get(index.fqn), index)
        return super().lookup_tensor(index) if box is None else box


def _boxes_of(state: dict[str, Any]) -> dict[str, DTensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, DTensor) and needs_boxes(value)
    }


def _chunk(box: Box) -> ChunkStorageMetadata:
    offsets, sizes = zip(*box.region, strict=True)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _writes(key: str, tensor: DTensor) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    items = []
    for box in local_boxes(tensor):
        chunk = _chunk(box)
        items.append(
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
            )
        )
    return items


def _box_of(value: Any, index: MetadataIndex) -> Tensor | None:
    """Return the box that begins at the offset of an index; None for tensors without boxes."""
    if not (isinstance(value, DTensor) and needs_boxes(value)):
        return None
    for box in local_boxes(value):
        if index.offset == torch.Size(start for start, _ in box.region):
            return box.view(value.to_local())
    raise ValueError(f"{index.fqn}: this rank holds no box at {index.offset}")
