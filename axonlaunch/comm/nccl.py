"""What NCCL there is on this node, found without starting it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist

from axonlaunch.system.forked_map import map_forked


@dataclass(frozen=True)
class NcclStatus:
    """Whether NCCL can be used here.

    Attributes:
        available: Ranks of this node can use ``backend=nccl``.
        version: NCCL's version (RCCL's on ROCm), or None where this torch has none.
        devices: The names of the devices that this process sees, by index.
        reason: Why it is not available; empty where it is.
    """

    available: bool
    version: str | None = None
    devices: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Device:
    """A device that this process sees.

    Attributes:
        name: Its model.
        memory_bytes: What it has in all.
        uuid: No other device has it, on any node.
    """

    name: str
    memory_bytes: int
    uuid: str


def status() -> NcclStatus:
    """Find out whether NCCL can be used here, and if not, why."""
    if not _is_built():
        return NcclStatus(
            available=False,
            reason=f"this torch ({torch.__version__}) is built without NCCL: install a CUDA or "
            "ROCm build of torch, or use backend=gloo",
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        names = [device.name for device in devices()]
    except RuntimeError as error:
        reason = f"this torch has NCCL {version}, but CUDA fails: {str(error).splitlines()[0]}"
        return NcclStatus(available=False, version=version, reason=reason)
    if not names:
        return NcclStatus(
            available=False,
            version=version,
            reason=f"this torch has NCCL {version}, but sees no device: look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or use backend=gloo",
        )
    return NcclStatus(available=True, version=version, devices=names)


def devices() -> list[Device]:
    """Return the devices that this process sees, without initialising CUDA in it.

    A process that has initialised CUDA can't fork one that computes any more: the copy's driver
    refuses, or its autograd ends it, even where it computes on the CPU alone. Therefore a copy of
    this process is asked, once.

    Raises:
        RuntimeError: There is a device or a driver, and CUDA fails.
    """
    if not _is_built():
        return []
    if torch.cuda.is_initialized():
        return devices_of_rank()
    return list(_asked(os.environ.get("CUDA_VISIBLE_DEVICES")))


def device_count() -> int:
    """Return how many devices this process sees; it may be left with CUDA initialised."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda" or not _is_built():
        return 0
    return torch.accelerator.device_count()


def devices_of_rank() -> list[Device]:
    """Return the devices that this process sees; it may be left with CUDA initialised."""
    if not _is_built():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Device(about.name, about.total_memory, str(about.uuid)) for about in properties]


def _is_built() -> bool:
    return bool(dist.is_available() and dist.is_nccl_available())


@cache
def _asked(visible: str | None) -> tuple[Device, ...]:
    """Ask a copy of this process; the argument is all that may change what it answers."""
    del visible
    return tuple(map_forked([devices_of_rank])[0])
