"""All private names of torch that tensor parallelism uses, and nothing else.

``tests/house/test_private_names.py`` checks each of them, so a torch release that moves one is
noticed there, and only this file has to change.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.tensor import DTensor


def assert_on_device(holds: Tensor, message: str) -> None:
    """Fail if a 0-dim bool tensor is false: at once on CPU, asynchronously on CUDA.

    Raises:
        RuntimeError: ``holds`` is false. Contains ``message``.
    """
    torch._assert_async(holds, message)


def spec_of(tensor: DTensor) -> Any:
    """Return a DTensor's mesh, placements and global shape, as needed to construct another one."""
    return tensor._spec


def fuse_exchanges(group_name: Any) -> None:
    """Let the compiler overlap products with the collectives of a group, in symmetric memory."""
    import torch._inductor.config

    compiler: Any = torch._inductor.config
    compiler._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 warns that this call is deprecated as unnecessary, but its compiler still
        # checks that symmetric memory was enabled.
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group_name)
