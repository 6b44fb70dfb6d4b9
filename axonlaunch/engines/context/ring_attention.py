"""Causal attention over sequences sharded among ranks, with torch's ring attention.

torch passes keys and values around the ring, balances the causal mask and merges partial results.
It supports only CUDA kernels, so this file passes the CPU's kernel to torch's templates. The
templates are private to ``torch.distributed.tensor.experimental``; they are used only here and
checked by ``tests/engines/test_context.py``.

Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; Brandon et al., "Striped
Attention", 2023 (balanced causal mask).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.precision.autocast import in_autocast_dtype

_aten = torch.ops.aten
_SEQUENCE_DIM = 2


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, group: ProcessGroup) -> Tensor:
    """Attend causally from this rank's part of a sequence to the full sequence.

    Args:
        q: Queries [B, heads, T / ranks, head_dim], at the positions of ``ContextAxis.positions``.
        k: Keys, shaped like ``q``, possibly with fewer heads, each shared by a group of query
            heads. Only these heads are communicated; each rank repeats them for its kernel.
        v: Values, shaped like ``k``.
        group: The ranks that share the sequence.

    Returns:
        Attention output [B, heads, T / ranks, head_dim].
    """
    # Autocast handles torch's attention by name, but not this function. Rotary tables may have made
    # the inputs fp32.
    q, k, v = in_autocast_dtype(q, k, v)
    attended: Tensor = _RingAttention.apply(q, k, v, group)  # type: ignore[no-untyped-call]
    return attended


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        out, logsumexp, *rest = _attention._templated_ring_attention(
            group.torch_group,
            _SEQUENCE_DIM,
            _for_groups(_kernel(q), q.shape[1] // k.shape[1]),
            query=q,
            key=k,
            value=v,
            is_causal=True,
        )
        tensors = [r for r in rest if isinstance(r, Tensor)]
        ctx.save_for_backward(q, k, v, out, logsumexp, *tensors)
        ctx.numbers = [r for r in rest if not isinstance(r, Tensor)]
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, k, v, out, logsumexp, *rest = ctx.saved_tensors
        kernel, name, options = _backward_kernel(q, rest, ctx.numbers)
        grad_q, grad_k, grad_v, *_ = _attention._templated_ring_attention_backward(
            ctx.group.torch_group,
            _SEQUENCE_DIM,
            _for_groups_backward(kernel, q.shape[1] // k.shape[1]),
            grad_out=grad_out.contiguous(),
            grad_out_name=name,
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=logsumexp,
            is_causal=True,
            **options,
        )
        return grad_q, grad_k, grad_v, None


def _for_groups(kernel: Any, size: int) -> Any:
    """Wrap a kernel so that each key-value head serves ``size`` query heads."""
    if size == 1:
        return kernel

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return kernel(q, *(x.repeat_interleave(size, dim=1) for x in (k, v)), **options)

    return attend


def _for_groups_backward(kernel: Any, size: int) -> Any:
    """Wrap a backward: a key-value head's gradient is the sum over its query heads."""
    if size == 1:
        return kernel

    def backward(*, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
        key, value = (x.repeat_interleave(size, dim=1) for x in (key, value))
        grad_q, *grads = kernel(key=key, value=value, **options)
        grad_k, grad_v = (x.unflatten(1, (-1, size)).sum(2) for x in grads[:2])
        return grad_q, grad_k, grad_v

    return backward


def _kernel(q: Tensor) -> Any:
    """Return torch's kernel for a device and type, with the ring's call signature."""
    if q.device.type == "cpu":
        return _on_cpu
    if q.dtype in (torch.float16, torch.bfloat16):
        return _aten._scaled_dot_product_flash_attention
    return _efficient


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p=0.0, is_causal=is_causal
    )
    return out, logsumexp


def _efficient(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=is_causal
    )
    return results


def _backward_kernel(
    q: Tensor, tensors: list[Tensor], numbers: list[Any]
) -> tuple[Any, str, dict[str, Any]]:
    """Return a kernel's backward, its name for the output gradient, and its extra arguments."""
    if q.device.type == "cpu":
        return _on_cpu_backward, "grad_out", {}
    if q.dtype in (torch.float16, torch.bfloat16):
        # rest of the forward: cum_seq_q, cum_seq_k, max_q, max_k, philox seed and offset, mask
        sequences: list[Tensor | None] = [*tensors[:-3]] or [None, None]
        return (
            _aten._scaled_dot_product_flash_attention_backward.default,
            "grad_out",
            {
                "cum_seq_q": sequences[0],
                "cum_seq_k": sequences[1],
                "max_q": numbers[-2],
                "max_k": numbers[-1],
                "dropout_p": 0.0,
                "philox_seed": tensors[-3],
                "philox_offset": tensors[-2],
            },
        )
    return (
        _aten._scaled_dot_product_efficient_attention_backward.default,
        "grad_out_",
        {
            "attn_bias": None,
            "philox_seed": tensors[0],
            "philox_offset": tensors[1],
            "dropout_p": 0.0,
            "grad_input_mask": (True, True, True, False),
        },
    )


def _on_cpu_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )
    return gradients
