"""Temporary buffers of gloo's collectives, for tracing a run on CPUs.

Reduce-scatter: gloo all-reduces a copy of the whole input, and each rank keeps its shard. A block
with 50 MB of bf16 parameters has 100 MB of fp32 gradients, so reducing them needs 100 MB more.
All-gather: gloo gathers into a flat copy, from which the result is filled. A process group has two
threads, so at most two gathers hold their copy at the same time.

Source: PyTorch, ``torch/csrc/distributed/c10d/ProcessGroupGloo.cpp``,
``reduce_scatter_tensor_coalesced`` and ``AsyncAllgatherWork``. Measured: with four ranks that
reduce-scatter 64 MiB, each held 64 MiB more. With two ranks that gather 64 MiB, each held 64 MiB
more, and 128 MiB more with four gathers at once.
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
"""Threads of a process group, which is also how many of its collectives run at a time."""


def collective_buffers(func: Any, arguments: Sequence[Any]) -> list[int]:
    """Return the bytes of each temporary buffer of an operation."""
    if func is not _REDUCE_SCATTER:
        return untraced_buffers(func, arguments)
    _, full_input, *_ = arguments
    return [full_input.nbytes]


def untraced_buffers(func: Any, arguments: Sequence[Any]) -> list[int]:
    """Return the bytes of each temporary buffer that a trace of real collectives cannot see."""
    if func is _GATHER or func is _FUNCTIONAL_REDUCE_SCATTER:
        return [arguments[0].nbytes]
    if func is _FUNCTIONAL_GATHER:
        shard, ranks, *_ = arguments
        return [ranks * shard.nbytes]
    return []


def outlives_call(func: Any, arguments: Sequence[Any]) -> bool:
    """Return whether an operation is a gather whose copy still exists when it returns.

    The copy is freed at an unknown time after that.
    """
    return func is _GATHER and (len(arguments) < 4 or bool(arguments[3]))  # True by default


def held_until_wait(func: Any) -> bool:
    """Return whether an operation's buffers are held until its result is waited for.

    The buffers of a functional gather are freed earlier. On fake tensors torch waits for the gather
    at once; in a run it waits when the result is first read, for example after the first part of
    ring attention.
    """
    return func is _FUNCTIONAL_REDUCE_SCATTER
