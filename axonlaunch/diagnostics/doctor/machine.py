"""Reports this node's versions and hardware, and tests its communication backends.

Its functions run in forked processes and change no settings.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonlaunch.comm import World, all_reduce_sum
from axonlaunch.comm.connection import nccl
from axonlaunch.comm.connection.rendezvous import local_place
from axonlaunch.config.options.hardware import GIB
from axonlaunch.system import gpus
from axonlaunch.system.node import host


def machine() -> dict[str, Any]:
    """Return versions, cores, memory and accelerators."""
    accelerator = torch.accelerator.current_accelerator()
    nccl_status = nccl.status()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(host.memory_bytes() / GIB, 1),
        "accelerator": accelerator.type if accelerator else None,
        "devices": _devices(),
        "driver": _driver(),
        "nccl": {
            "available": nccl_status.available,
            "version": nccl_status.version,
            "devices": list(nccl_status.devices),
            "reason": nccl_status.reason,
        },
    }


def _devices() -> list[dict[str, Any]]:
    try:
        devices = gpus.devices()
    except RuntimeError:
        return []  # NCCL's status contains the reason
    return [
        {"index": index, "name": device.name, "memory_gib": round(device.memory_bytes / GIB, 1)}
        for index, device in enumerate(devices)
    ]


def _driver() -> str | None:
    """Return the version of the NVIDIA driver from its kernel module."""
    version = Path("/sys/module/nvidia/version")
    return version.read_text().strip() if version.is_file() else None


def try_rank(backend: str, rank: int, world_size: int, store: str) -> float:
    """Run one rank of an all-reduce between processes; return the sum of 1 over the ranks."""
    file_store = dist.FileStore(store, world_size)
    with World.join(
        local_place(rank, world_size), backend=backend, timeout_s=30, store=file_store
    ) as world:
        return float(all_reduce_sum(torch.ones(8, device=world.device))[0])


def try_mock(world_size: int) -> float:
    """Run an all-reduce between threads; return the sum of 1 over the ranks."""
    return World.mock(world_size).run(lambda world: float(all_reduce_sum(torch.ones(8))[0]))[0]
