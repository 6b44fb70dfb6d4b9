"""Names for what carries the bytes and for how values of ranks are combined; no torch objects."""

from __future__ import annotations

from enum import Enum, StrEnum


class Backend(StrEnum):
    """What carries the bytes between ranks."""

    GLOO = "gloo"
    """Processes over TCP, on CPU tensors."""

    NCCL = "nccl"
    """Processes over NVLink, PCIe or the network, on CUDA (or ROCm) tensors."""

    MOCK = "mock"
    """Threads of one process, on CPU tensors, one at a time and deterministic."""


class ReduceOp(Enum):
    """How the values of all ranks become one; ``Average`` is for floating-point only."""

    Sum = "sum"
    Product = "product"
    Min = "min"
    Max = "max"
    Average = "average"
