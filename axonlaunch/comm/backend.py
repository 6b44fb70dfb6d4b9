"""Names of communication backends and reduction operations, without torch objects."""

from __future__ import annotations

from enum import Enum, StrEnum


class Backend(StrEnum):
    """Communication backend between ranks."""

    GLOO = "gloo"
    """Processes over TCP, on CPU tensors; for GPU tensors only reductions and broadcasts."""

    NCCL = "nccl"
    """Processes over NVLink, PCIe or the network, on CUDA (or ROCm) tensors."""

    MOCK = "mock"
    """Threads of one process, one at a time: deterministic on a CPU, or sharing one GPU."""

    @property
    def torch_name(self) -> str:
        """Backend name for torch's ``init_process_group``.

        A world on NCCL also uses gloo for CPU tensors, so that counters, norms of offloaded
        gradients and checkpoint plans never wait for the device.
        """
        return "cpu:gloo,cuda:nccl" if self is Backend.NCCL else self.value

    @classmethod
    def of_torch(cls, name: str) -> Backend:
        """Return the backend for a name of a torch backend.

        torch's ``fake`` backend, a single rank in a world of any size, counts as the mock world:
        its CPU tensors never leave the process.

        Raises:
            ValueError: The backend is not supported.
        """
        if "nccl" in name.split(",")[-1].split(":"):
            return cls.NCCL
        return cls.MOCK if name == "fake" else cls(name)


MockBackend = Backend.MOCK
"""Another name for ``Backend.MOCK``."""
NcclBackend = Backend.NCCL
"""Another name for ``Backend.NCCL``."""


class ReduceOp(Enum):
    """How the values of all ranks are combined; ``Average`` is only for floating-point values."""

    Sum = "sum"
    Product = "product"
    Min = "min"
    Max = "max"
    Average = "average"
