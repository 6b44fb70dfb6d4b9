"""What gloo holds beside a collective's own buffers, where a run on CPUs is traced.

It reduces a copy of the whole input for all ranks, and each keeps its part of it: of the fp32
gradients of a block whose parameters are 50 MB in bf16, 100 MB more, while they are reduced. It
gathers into a flat copy, from which the result is filled. A group has two threads, so that of many
gathers on their way two have theirs.

Source: PyTorch, ``torch/csrc/distributed/c10d/ProcessGroupGloo.cpp``,
``reduce_scatter_tensor_coalesced`` and ``AsyncAllgatherWork``. Of four ranks that scatter 64 MiB
each held 64 MiB more; of two ranks that gather 64 MiB each held 64 MiB more, and 128 MiB of four
gathers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
_GATHER = torch.ops.c10d._allgather_base_.default
_FUNCTIONAL_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
_FUNCTIONAL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
THREADS = 2
"""Of a group: as many of its collectives are under way, whoever waits for them."""


def of_collective(func: Any, arguments: Sequence[Any]) -> list[int]:
    """Return the bytes of each buffer that an operation holds besides."""
    if func is not _REDUCE_SCATTER:
        return unseen(func, arguments)
    _, whole, *_ = arguments
    return [whole.nbytes]


def unseen(func: Any, arguments: Sequence[Any]) -> list[int]:
    """Return those of them that a trace of ranks which really exchange does not see made."""
    if func is _GATHER or func is _FUNCTIONAL_REDUCE_SCATTER:
        return [arguments[0].nbytes]
    if func is _FUNCTIONAL_GATHER:
        part, ranks, *_ = arguments
        return [ranks * part.nbytes]
    return []


def returns_before(func: Any, arguments: Sequence[Any]) -> bool:
    """Say whether a gather's copy is there when it has returned; nothing says until when."""
    return func is _GATHER and (len(arguments) < 4 or bool(arguments[3]))  # True by default


def are_awaited(func: Any) -> bool:
    """Say whether an operation's buffers are held until somebody waits for its result.

    A functional gather's are not counted so long: on fake tensors torch waits for it at once, in a
    run only when its result is read, as after the first part of a ring's attention.
    """
    return func is _FUNCTIONAL_REDUCE_SCATTER
