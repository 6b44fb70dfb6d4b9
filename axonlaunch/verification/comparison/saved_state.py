"""Compares a layout's checkpoint, read by one process and by ranks with other shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from axonlaunch import checkpoint
from axonlaunch.checkpoint.loading import reader
from axonlaunch.checkpoint.loading.reader import read_full_tensors, refuse_damage
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.precision import quantizes_states
from axonlaunch.models.tensors.dtensor_regions import dtensor_of, packed_placement
from axonlaunch.verification.references.differences import (
    Difference,
    as_number,
    compare_numbers,
    compare_tensors,
)
from axonlaunch.verification.references.plain_rounding import saved_values
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.references.tolerances import PARAMETER_FLOOR, state_floors

_PIECES = 2
"""Separate parts of a parameter that each rank reads."""


def read_by_one_process(
    saved: checkpoint.Checkpoint, reference: Reference, config: RunConfig
) -> Iterator[Difference]:
    """Compare the checkpoint, read by one process, with the state of the reference."""
    number = reference.saved_step - 1
    refuse_damage(saved)
    wanted = {
        "model": {**reference.parameters, **reference.buffers},
        "optimizer": reference.states,
    }
    read: dict[str, dict[str, Any]] = {
        section: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        for section, tensors in wanted.items()
    }
    if quantizes_states(config.optimizer):
        read["optimizer"] |= _memory_of_codes(saved, reference)
    read["counters"] = {"step": torch.tensor(0)}
    read_full_tensors(saved, read)
    floor = state_floors(reference.states)
    for section, tensors in wanted.items():
        for name, expected in tensors.items():
            least, actual = PARAMETER_FLOOR, read[section][name]
            if section == "optimizer":
                least = floor.get(name.rpartition(".")[2], 0.0)
                if quantizes_states(config.optimizer):
                    actual = saved_values(name, actual)
            quantity = (number, "checkpoint", f"{section}.{name}")
            yield compare_tensors(quantity, actual, expected, floor=least)
    steps = as_number(read["counters"]["step"]) or 0.0
    yield compare_numbers(number, "checkpoint", steps, float(reference.saved_step))


def _memory_of_codes(saved: checkpoint.Checkpoint, reference: Reference) -> dict[str, Tensor]:
    """Return memory for the states that a checkpoint holds in 8 bits."""
    contents: dict[str, Any] = reader.contents(saved)
    entries = {name: contents.get(f"optimizer.{name}") for name in reference.states}
    return {
        name: torch.zeros(entry.size, dtype=torch.uint8)
        for name, entry in entries.items()
        if entry is not None and entry.properties.dtype is torch.uint8
    }


def read_in_parts(
    saved: checkpoint.Checkpoint, reference: Reference, *, world: World
) -> Iterator[Difference]:
    """Compare a checkpoint's parameters, read by ranks with other shards, with the reference.

    Each rank reads two separate parts of one dimension, as another layout would. Parameters without
    a dimension that can be divided this way are skipped; ``read_by_one_process`` covers them. All
    ranks must call this.
    """
    size, number, device = world.world_size, reference.saved_step - 1, world.device
    mesh = DeviceMesh.from_group(world.default_group.torch_group, device.type)
    parts: dict[str, Tensor] = {}
    for number_read, (name, expected) in enumerate(reference.parameters.items()):
        dim = number_read % max(1, expected.ndim)
        if not expected.ndim or expected.shape[dim] % (_PIECES * size):
            continue
        local = torch.zeros_like(expected.chunk(size, dim)[0], device=device)
        layout = {"shape": expected.shape, "stride": expected.contiguous().stride()}
        parts[name] = dtensor_of(local, mesh, [packed_placement(dim, pieces=_PIECES)], **layout)
    state = {"model": parts}
    checkpoint.load_checkpoint(saved, state, world=world)
    for name, part in parts.items():
        quantity = (number, "checkpoint", f"model.{name}")
        yield compare_tensors(quantity, part, reference.parameters[name], floor=PARAMETER_FLOOR)
