"""The private names of torch that tensor parallelism stands on: all of them, and nothing else.

``tests/house/test_private_names.py`` pins each: when torch moves one, it says which, and the fix
belongs in this file alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.tensor import DTensor


def assert_on_device(holds: Tensor, message: str) -> None:
    """Fail where a 0-dim bool is false: at once on CPU, on CUDA when the device gets there.

    Raises:
        RuntimeError: With the message.
    """
    torch._assert_async(holds, message)


def spec_of(tensor: DTensor) -> Any:
    """Return the mesh, placements and whole shape of a DTensor, by which another is made."""
    return tensor._spec


def fuse_exchanges(group_name: Any) -> None:
    """Let the compiler multiply while it exchanges within a group, which has symmetric memory."""
    import torch._inductor.config

    compiler: Any = torch._inductor.config
    compiler._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 says that nobody needs to call it, and its compiler asks whether it was called.
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group_name)
