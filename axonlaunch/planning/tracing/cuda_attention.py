"""What attention holds on a GPU, where a run for one is traced on a CPU.

The CPU's kernel returns what CUDA's do, and holds nothing beside it; theirs need more in backward.
Of AMD's kernels nothing is known here: they count as NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import estimated_on
from axonlaunch.models import attention

Workspaces: TypeAlias = Callable[[Any, Sequence[Any]], list[int]]
"""An operation and its arguments to the bytes of each buffer that its kernel holds besides."""

_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FP32 = 4
_ROWS = 128
"""Queries are padded to a multiple of these."""


def runs_on_gpu(config: RunConfig) -> bool:
    """Return whether a run is estimated for a GPU."""
    return estimated_on(config) == "gpu"


def repeat_heads_as_on_cuda() -> None:
    """Let models repeat the heads that CUDA's kernels want repeated; for a process of its own."""
    attention.refuses_groups = lambda q, mask: attention.refuses_groups_on_cuda(q, mask)


def workspaces(config: RunConfig) -> Workspaces:
    """Return what kernels hold beside their results on the devices of a run."""
    if not runs_on_gpu(config):
        return lambda func, arguments: []
    multiprocessors = config.hardware.multiprocessors if config.hardware else None
    if not config.train.deterministic:
        multiprocessors = None

    def of_kernel(func: Any, arguments: Sequence[Any]) -> list[int]:
        if func is not _BACKWARD:
            return []
        _, q, k, *_ = arguments
        return backward_workspaces(q, k, multiprocessors=multiprocessors)

    return of_kernel


def backward_workspaces(q: Tensor, k: Tensor, *, multiprocessors: int | None = None) -> list[int]:
    """Return the bytes of each buffer that attention's backward holds beside its three gradients.

    In fp16 and bf16: an fp32 sum for the queries' gradient, a number for each query, and where
    heads of keys are shared their gradients for each head of the queries. In fp32, by the
    memory-efficient kernel: a product as large as the output, and a number for each query.

    Args:
        q: [B, heads, T, head_dim].
        k: [B, key-value heads, S, head_dim].
        multiprocessors: Of a device that computes deterministically, with a sum for each of the
            parts that it divides the keys into; None: one sum.

    Source: PyTorch, ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``,
    ``mha_bwd``, and ``cuda/attention_backward.cu``; NVIDIA/cudnn-frontend,
    ``scaled_dot_product_flash_attention.h``, has the same buffers.
    """
    batch, heads, queries, width = q.shape
    if q.dtype not in (torch.float16, torch.bfloat16):
        return [batch * heads * queries * width * _FP32, batch * heads * queries * _FP32]
    padded = batch * heads * _up(queries, _ROWS)
    sums = 1 if multiprocessors is None else -(-multiprocessors // (batch * heads))
    buffers = [padded * _FP32, sums * padded * _up(width, 32 if width <= 128 else 64) * _FP32]
    if k.shape[1] != heads:
        buffers += 2 * [batch * heads * k.shape[2] * width * q.element_size()]
    return buffers


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
