"""What NCCL there is on this node, found without starting it, and identifiers of communicators."""

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
        available: Ranks of this node can use ``backend=nccl``.
        version: NCCL's version (RCCL's on ROCm), or None where this torch has none.
        devices: The names of the devices that this process sees, by index.
        reason: Why it is not available; empty where it is.
    """

    available: bool
    version: str | None = None
    devices: list[str] = field(default_factory=list)
    reason: str = ""


def status() -> NcclStatus:
    """Find out whether NCCL can be used here, and if not, why."""
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
    """Identifier by which the ranks of an NCCL communicator find each other: 128 bytes.

    Worlds on NCCL make and exchange theirs through the store. It is needed only for a communicator
    of one's own, made by ``torch.cuda.nccl.init_rank``.
    """

    SIZE = 128

    def __new__(cls, content: bytes) -> Self:
        """Take over an identifier that another rank sent.

        Raises:
            ValueError: It is not 128 bytes long.
        """
        if len(content) != cls.SIZE:
            raise ValueError(f"an NCCL identifier has {cls.SIZE} bytes, not {len(content)}")
        return super().__new__(cls, content)

    @classmethod
    def create(cls) -> Self:
        """Make a new identifier on this node, for one rank to send to the others.

        Raises:
            NcclError: There is no NCCL here.
        """
        found = status()
        if not found.available:
            raise NcclError(found.reason)
        return cls(torch.cuda.nccl.unique_id())
