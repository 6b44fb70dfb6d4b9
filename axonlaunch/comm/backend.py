"""Names for what carries the bytes and for how values of ranks are combined; no torch objects."""

from __future__ import annotations

from enum import Enum, StrEnum


class Backend(StrEnum):
    """What carries the bytes between ranks."""

    GLOO = "gloo"
    """Processes over TCP, on CPU tensors; of those of a GPU it reduces and broadcasts alone."""

    NCCL = "nccl"
    """Processes over NVLink, PCIe or the network, on CUDA (or ROCm) tensors."""

    MOCK = "mock"
    """Threads of one process, one at a time: on a CPU, deterministic, or on one GPU."""

    @property
    def torch_name(self) -> str:
        """What torch's ``init_process_group`` is given.

        A world on NCCL carries CPU tensors by gloo beside it: counters, offloaded gradients'
        norms and checkpoints' plans never wait for the device.
        """
        return "cpu:gloo,cuda:nccl" if self is Backend.NCCL else self.value

    @classmethod
    def of_torch(cls, name: str) -> Backend:
        """Return what carries the bytes under a torch backend's name.

        torch's own ``fake`` backend, one rank alone in a world of any size, passes for the mock
        world: CPU tensors that never leave the process.

        Raises:
            ValueError: It is not supported.
        """
        if "nccl" in name.split(",")[-1].split(":"):
            return cls.NCCL
        return cls.MOCK if name == "fake" else cls(name)


MockBackend = Backend.MOCK
"""Another name for ``Backend.MOCK``."""
NcclBackend = Backend.NCCL
"""Another name for ``Backend.NCCL``."""


class ReduceOp(Enum):
    """How the values of all ranks become one; ``Average`` is for floating-point only."""

    Sum = "sum"
    Product = "product"
    Min = "min"
    Max = "max"
    Average = "average"
