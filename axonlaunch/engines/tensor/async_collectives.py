"""Overlaps matrix products of compiled blocks with the collectives next to them.

torch's compiler finds an all-gather before a product or a reduce-scatter after one, and computes
the product in parts while other parts are transferred. Each rank reads the missing parts directly
from the memory of the other GPUs, without NCCL.

Source: PyTorch, "Introducing Async Tensor Parallelism in PyTorch", 2024; torchtitan,
``maybe_enable_async_tp``.
"""

from __future__ import annotations

from axonlaunch.comm import Backend, ProcessGroup
from axonlaunch.comm.autograd import make_fusible
from axonlaunch.engines.tensor.torch_internals import fuse_exchanges


def overlap_exchanges(group: ProcessGroup) -> None:
    """Overlap products with collectives in everything compiled from now on.

    All ranks of the group must call it. With a backend other than NCCL it has no effect; estimates
    use such a backend.
    """
    if group.backend is not Backend.NCCL:
        return
    make_fusible(group)
    fuse_exchanges(group.torch_group.group_name)
