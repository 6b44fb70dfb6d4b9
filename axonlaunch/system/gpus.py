"""The GPUs of this node that this process sees, asked for without initialising CUDA in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from axonlaunch.system.forked_map import map_forked


@dataclass(frozen=True)
class Device:
    """A GPU that this process sees.

    Attributes:
        name: Of its model, as the driver gives it.
        memory_bytes: Its memory in all.
        uuid: No other device has it, on any node.
    """

    name: str
    memory_bytes: int
    uuid: str


def devices() -> list[Device]:
    """Return the GPUs that this process sees, without initialising CUDA in it.

    A process that has initialised CUDA can't fork one that computes any more: the copy's driver
    refuses, or its autograd ends it, even where it computes on the CPU alone. Therefore a copy of
    this process is asked, once.

    Raises:
        RuntimeError: There is a device or a driver, and CUDA fails.
    """
    if not has_nccl():
        return []
    if torch.cuda.is_initialized():
        return devices_of_rank()
    return list(_ask(os.environ.get("CUDA_VISIBLE_DEVICES")))


def device_count() -> int:
    """Return how many GPUs this process sees; it may be left with CUDA initialised."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda" or not has_nccl():
        return 0
    return torch.accelerator.device_count()


def devices_of_rank() -> list[Device]:
    """Return what ``devices`` does, at once: this process may be left with CUDA initialised."""
    if not has_nccl():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Device(about.name, about.total_memory, str(about.uuid)) for about in properties]


def has_nccl() -> bool:
    """Say whether this torch is built with NCCL (RCCL on ROCm), without which no GPU is used."""
    return bool(dist.is_available() and dist.is_nccl_available())


@cache
def _ask(visible: str | None) -> tuple[Device, ...]:
    """Ask a copy of this process; the argument is all that may change what it answers."""
    del visible
    return tuple(map_forked([devices_of_rank], task="looking for GPUs")[0])
