"""Detects whether NCCL can be used on this node, and handles communicator identifiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch

from axonlaunch.comm.errors import NcclError
from axonlaunch.system import gpus


@dataclass(frozen=True)
class NcclStatus:
    """Whether NCCL can be used here.

    Attributes:
        available: Whether ranks of this node can use ``backend=nccl``.
        version: Version of NCCL (of RCCL on ROCm), or None if this torch has none.
        devices: Names of the devices that this process sees, by index.
        reason: Why NCCL is not available; empty if it is.
    """

    available: bool
    version: str | None = None
    devices: list[str] = field(default_factory=list)
    reason: str = ""


def status() -> NcclStatus:
    """Return whether NCCL can be used here, and the reason if not."""
    if not gpus.has_nccl():
        return NcclStatus(
            available=False,
            reason=f"this torch ({torch.__version__}) is built without NCCL: install a CUDA or "
            "ROCm build of torch, or use backend=gloo",
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        names = [device.name for device in gpus.devices()]
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


class NcclUniqueId(bytes):
    """Identifier of 128 bytes with which the ranks of an NCCL communicator find each other.

    Worlds on NCCL create and exchange identifiers through the store. This class is needed only for
    custom communicators, which ``torch.cuda.nccl.init_rank`` creates.
    """

    SIZE = 128

    def __new__(cls, content: bytes) -> Self:
        """Wrap an identifier that another rank sent.

        Raises:
            ValueError: The identifier is not 128 bytes long.
        """
        if len(content) != cls.SIZE:
            raise ValueError(f"an NCCL identifier has {cls.SIZE} bytes, not {len(content)}")
        return super().__new__(cls, content)

    @classmethod
    def create(cls) -> Self:
        """Create an identifier on this node; one rank sends it to the others.

        Raises:
            NcclError: NCCL is not available here.
        """
        nccl_status = status()
        if not nccl_status.available:
            raise NcclError(nccl_status.reason)
        return cls(torch.cuda.nccl.unique_id())
