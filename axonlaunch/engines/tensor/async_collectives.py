"""Matrix products of compiled blocks that are computed part by part, while other parts travel.

torch's compiler finds them: an all-gather before a product, a reduce-scatter after one. Each rank
reads what it lacks from the memory of the others' GPUs, without NCCL.

Source: PyTorch, "Introducing Async Tensor Parallelism in PyTorch", 2024; torchtitan,
``maybe_enable_async_tp``.
"""

from __future__ import annotations

from axonlaunch.comm import Backend, ProcessGroup
from axonlaunch.comm.autograd import make_fusible
from axonlaunch.engines.tensor.torch_internals import fuse_exchanges


def overlap_exchanges(group: ProcessGroup) -> None:
    """Let what is compiled from now on multiply while it exchanges; all ranks of the group call.

    Off NCCL nothing changes: there an estimate stands for one of its ranks.
    """
    if group.backend is not Backend.NCCL:
        return
    make_fusible(group)
    fuse_exchanges(group.torch_group.group_name)
