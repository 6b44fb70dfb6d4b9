"""Matrix products of compiled blocks that are computed part by part, while other parts travel.

torch's compiler finds them: an all-gather before a product, a reduce-scatter after one. Each rank
reads what it lacks from the memory of the others' GPUs, without NCCL.

Source: PyTorch, "Introducing Async Tensor Parallelism in PyTorch", 2024; torchtitan,
``maybe_enable_async_tp``.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed import _symmetric_memory

from axonlaunch.comm import Backend, ProcessGroup
from axonlaunch.comm.autograd import make_fusible


def overlap_exchanges(group: ProcessGroup) -> None:
    """Let what is compiled from now on multiply while it exchanges; all ranks of the group call.

    Off NCCL nothing changes: there an estimate stands for one of its ranks.
    """
    if group.backend is not Backend.NCCL:
        return
    import torch._inductor.config

    compiler: Any = torch._inductor.config
    compiler._micro_pipeline_tp = True
    make_fusible(group)
    with warnings.catch_warnings():
        # torch 2.13 says that nobody needs to call it, and its compiler asks whether it was called.
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.torch_group.group_name)
