"""Memory of attention on CUDA for GPU runs that are traced on a CPU.

The CPU kernel returns the same tensors as the CUDA kernels and needs no further memory. The CUDA
kernels need temporary buffers in backward. AMD GPUs are assumed to need the same as NVIDIA GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import estimate_device
from axonlaunch.models.modules import attention

Workspaces: TypeAlias = Callable[[Any, Sequence[Any]], list[int]]
"""Maps an operation and its arguments to the bytes of each temporary buffer of its kernel."""

_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FP32_BYTES = 4
_QUERY_MULTIPLE = 128
"""The number of queries is padded to a multiple of this."""


def runs_on_gpu(config: RunConfig) -> bool:
    """Return whether the run is estimated for a GPU."""
    return estimate_device(config) == "gpu"


def repeat_heads_as_on_cuda() -> None:
    """Patch attention for this process: heads are repeated as the CUDA kernels need it.

    The patch is never undone, so call this only in a process forked for one estimate.
    """
    attention.refuses_groups = lambda q, mask: attention.refuses_groups_on_cuda(q, mask)


def workspaces(config: RunConfig) -> Workspaces:
    """Return the function that lists the temporary buffers of kernels on the devices of a run."""
    if not runs_on_gpu(config):
        return lambda func, arguments: []
    multiprocessors = config.hardware.multiprocessors if config.hardware else None
    if not config.train.deterministic:
        multiprocessors = None

    def kernel_workspaces(func: Any, arguments: Sequence[Any]) -> list[int]:
        if func is not _BACKWARD:
            return []
        _, q, k, *_ = arguments
        return backward_workspaces(q, k, multiprocessors=multiprocessors)

    return kernel_workspaces


def backward_workspaces(q: Tensor, k: Tensor, *, multiprocessors: int | None = None) -> list[int]:
    """Return the bytes of each temporary buffer of attention's backward, without the gradients.

    The buffers depend on the type of the queries:

    - fp16 and bf16: an fp32 accumulator for the gradient of the queries and one number per query.
      If key-value heads are shared, also the gradients of keys and values for each query head.
    - fp32 (memory-efficient kernel): a product as large as the output and one number per query.

    Args:
        q: Queries [B, heads, T, head_dim].
        k: Keys [B, key-value heads, S, head_dim].
        multiprocessors: Number of multiprocessors of a device that computes deterministically: it
            divides the keys into parts and holds one accumulator per part. None: one accumulator.

    Source: PyTorch, ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``,
    ``mha_bwd``, and ``cuda/attention_backward.cu``; NVIDIA/cudnn-frontend,
    ``scaled_dot_product_flash_attention.h``, has the same buffers.
    """
    batch, heads, queries, width = q.shape
    if q.dtype not in (torch.float16, torch.bfloat16):
        return [
            batch * heads * queries * width * _FP32_BYTES,
            batch * heads * queries * _FP32_BYTES,
        ]
    padded_queries = batch * heads * _round_up(queries, _QUERY_MULTIPLE)
    accumulators = 1 if multiprocessors is None else -(-multiprocessors // (batch * heads))
    buffers = [
        padded_queries * _FP32_BYTES,
        accumulators * padded_queries * _round_up(width, 32 if width <= 128 else 64) * _FP32_BYTES,
    ]
    if k.shape[1] != heads:
        buffers += 2 * [batch * heads * k.shape[2] * width * q.element_size()]
    return buffers


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
