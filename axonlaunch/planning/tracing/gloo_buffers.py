"""What gloo holds beside a collective's own buffers, where a run on CPUs is traced.

It reduces a copy of the whole input for all ranks, and each keeps its part of it: of the fp32
gradients of a block whose parameters are 50 MB in bf16, 100 MB more, while they are reduced.

Source: PyTorch, ``torch/csrc/distributed/c10d/ProcessGroupGloo.cpp``,
``reduce_scatter_tensor_coalesced``. Of four ranks that scatter 64 MiB each held 64 MiB more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
_FUNCTIONAL = torch.ops._c10d_functional.reduce_scatter_tensor.default


def of_collective(func: Any, arguments: Sequence[Any]) -> list[int]:
    """Return the bytes of each buffer that an operation holds besides."""
    if func is not _REDUCE_SCATTER:
        return unseen(func, arguments)
    _, whole, *_ = arguments
    return [whole.nbytes]


def unseen(func: Any, arguments: Sequence[Any]) -> list[int]:
    """Return those of them that a trace of ranks which really exchange does not see made."""
    return [arguments[0].nbytes] if func is _FUNCTIONAL else []
