"""Adds fake-tensor kernels for operations whose fake kernel in torch is too strict."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from axonlaunch.models.torch_internals import fake_impls


@functools.cache
def install_fake_kernels() -> None:
    """Register the kernels with torch, once in a process."""
    operation = torch.ops.aten._grouped_mm.default
    if operation not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(operation)(_grouped_mm)


def _grouped_mm(
    mode: Any,
    func: Any,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of groups of rows for any dtype; torch's fake kernel accepts only bf16.

    [S, K] x [G, K, N] gives [S, N]. [K, S] x [S, N] in G groups gives [G, K, N]. [G, M, K] x [K, S]
    gives [M, S]. [G, M, K] x [G, K, N] gives [G, M, N].
    """
    del func, bias
    if mat_a.dim() == 2 and mat_b.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], mat_a.shape[0], mat_b.shape[1])
    elif mat_a.dim() == mat_b.dim():
        shape = (mat_b.shape[0], mat_a.shape[1], mat_b.shape[2])
    else:
        shape = (mat_a.shape[-2], mat_b.shape[-1])
    with mode:
        return torch.empty(shape, dtype=out_dtype or mat_a.dtype, device=mat_a.device)
