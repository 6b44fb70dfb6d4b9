"""What is read from a layout's checkpoint, by one process and by ranks that divide it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from axonlaunch import checkpoint
from axonlaunch.checkpoint.reader import read_whole_tensors, refuse_damage
from axonlaunch.comm import World
from axonlaunch.models.dtensor_regions import dtensor_of, packed_placement
from axonlaunch.verification.differences import Difference, as_number, of_number, of_tensor
from axonlaunch.verification.reference_values import Reference
from axonlaunch.verification.tolerances import PARAMETER_FLOOR, state_floors

_PIECES = 2
"""Parts of a parameter that a rank reads, in place of the one that it would hold."""


def read_by_one_process(saved: checkpoint.Checkpoint, reference: Reference) -> Iterator[Difference]:
    """Compare what one process reads with what it would have saved itself."""
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
    read["counters"] = {"step": torch.tensor(0)}
    read_whole_tensors(saved, read)
    floor = state_floors(reference.states)
    for section, tensors in wanted.items():
        for name, expected in tensors.items():
            least = PARAMETER_FLOOR
            if section == "optimizer":
                least = floor.get(name.rpartition(".")[2], 0.0)
            where = (number, "checkpoint", f"{section}.{name}")
            yield of_tensor(where, read[section][name], expected, floor=least)
    steps = as_number(read["counters"]["step"]) or 0.0
    yield of_number(number, "checkpoint", steps, float(reference.saved_step))


def read_in_parts(
    saved: checkpoint.Checkpoint, reference: Reference, *, world: World
) -> Iterator[Difference]:
    """Compare parameters that another layout reads: each rank some parts of one of their dims.

    They begin and end elsewhere than what was saved. Those that the ranks do not divide are left
    out: one process reads them. Every rank calls this.
    """
    size, number, device = world.world_size, reference.saved_step - 1, world.device
    mesh = DeviceMesh.from_group(world.default_group.torch_group, device.type)
    parts: dict[str, Tensor] = {}
    for place, (name, expected) in enumerate(reference.parameters.items()):
        dim = place % max(1, expected.ndim)
        if not expected.ndim or expected.shape[dim] % (_PIECES * size):
            continue
        own = torch.zeros_like(expected.chunk(size, dim)[0], device=device)
        kept = {"shape": expected.shape, "stride": expected.contiguous().stride()}
        parts[name] = dtensor_of(own, mesh, [packed_placement(dim, pieces=_PIECES)], **kept)
    state = {"model": parts}
    checkpoint.load_checkpoint(saved, state, world=world)
    for name, part in parts.items():
        where = (number, "checkpoint", f"model.{name}")
        yield of_tensor(where, part, reference.parameters[name], floor=PARAMETER_FLOOR)
