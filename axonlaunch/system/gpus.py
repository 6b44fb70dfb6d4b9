"""Lists the GPUs visible to this process without initializing CUDA in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from axonlaunch.system.processes.forked_map import map_forked


@dataclass(frozen=True)
class Device:
    """A GPU visible to this process.

    Attributes:
        name: Model name reported by the driver.
        memory_bytes: Total memory in bytes.
        uuid: Identifier that is unique across nodes.
        has_bf16: Whether its matrix units compute in bf16.
        has_fp8: Whether its matrix units multiply numbers of torch's float8_e4m3fn.
    """

    name: str
    memory_bytes: int
    uuid: str
    has_bf16: bool = True
    has_fp8: bool = True


def devices() -> list[Device]:
    """Return the GPUs visible to this process without initializing CUDA in it.

    After CUDA is initialized, forked copies of a process can't compute any more, not even on the
    CPU: the driver or autograd of the copy fails. Therefore the GPUs are queried once in a forked
    copy.

    Raises:
        RuntimeError: There is a device or a driver, but CUDA fails.
    """
    if not has_nccl():
        return []
    if torch.cuda.is_initialized():
        return devices_of_rank()
    return list(_ask(os.environ.get("CUDA_VISIBLE_DEVICES")))


def device_count() -> int:
    """Return the number of visible GPUs. This may initialize CUDA in this process."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda" or not has_nccl():
        return 0
    return torch.accelerator.device_count()


def devices_of_rank() -> list[Device]:
    """Return the same as ``devices``, queried directly. This may initialize CUDA here."""
    if not has_nccl():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        Device(gpu.name, gpu.total_memory, str(gpu.uuid), _has_bf16(gpu), _has_fp8(gpu))
        for gpu in properties
    ]


def _has_bf16(properties: Any) -> bool:
    """Return whether a device computes in bf16, as ``torch.cuda.is_bf16_supported`` decides it.

    It does so from NVIDIA's compute capability 8.0 on (Ampere), and on all GPUs of AMD.
    """
    return torch.version.hip is not None or int(properties.major) >= 8


def _has_fp8(properties: Any) -> bool:
    """Return whether a device has products of ``torch.float8_e4m3fn``.

    NVIDIA's have them from compute capability 8.9 on (Ada and Hopper), AMD's from MI350 and Radeon
    RX 9000 on; MI300 has another 8-bit format (``torch.float8_e4m3fnuz``).
    """
    if torch.version.hip is not None:
        return str(properties.gcnArchName).startswith(("gfx95", "gfx12"))
    return (int(properties.major), int(properties.minor)) >= (8, 9)


def has_nccl() -> bool:
    """Return whether torch is built with NCCL (RCCL on ROCm), which runs on GPUs require."""
    return bool(dist.is_available() and dist.is_nccl_available())


@cache
def _ask(visible: str | None) -> tuple[Device, ...]:
    """Query a forked copy. The argument is the cache key, because the result depends only on it."""
    del visible
    return tuple(map_forked([devices_of_rank], task="looking for GPUs")[0])
