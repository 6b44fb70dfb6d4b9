"""Memory of dropout on CUDA for GPU runs that are traced on a CPU.

On CUDA one kernel applies dropout and keeps its mask in one byte per value; on a CPU, the mask is
kept in the type of the values. Kernels of attention on CUDA draw their mask again in backward; on a
CPU, attention with dropout is computed by several operations, which keep all scores.

Source: PyTorch, ``dropout`` in ``aten/src/ATen/native/Dropout.cpp``, ``NativeDropoutBackward0`` in
``tools/autograd/derivatives.yaml``, and ``check_for_dropout`` in
``aten/src/ATen/native/transformers/sdp_utils_cpp.h``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_unfused_dropout = nn.functional.dropout
_attention = nn.functional.scaled_dot_product_attention


def drop_as_on_cuda() -> None:
    """Patch dropout and attention for this process: they allocate as on CUDA.

    The patch is never undone, so call this only in a process forked for one estimate.
    """
    nn.functional.dropout = _dropout
    nn.functional.scaled_dot_product_attention = _attention_without_mask


def _dropout(
    input: Tensor,  # noqa: A002  (torch's name)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return _unfused_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention_without_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    del dropout_p
    return _attention(query, key, value, attn_mask, 0.0, *arguments, **options)
