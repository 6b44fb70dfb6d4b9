"""Memory of RMSNorm on CUDA for GPU runs that are traced on a CPU.

Since torch 2.9, CUDA builds compute RMSNorm with one kernel, which keeps its input and one number
per row for backward. On a CPU, several operations compute it, and two of their results are kept in
fp32. Other norms are a single operation on both devices.

Source: PyTorch 2.11 and 2.13, ``rms_norm_symint`` in ``aten/src/ATen/native/layer_norm.cpp``;
``FusedRmsNormBackward0`` in the headers of their wheels lists the tensors that it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.torch_internals import is_cast_by_autocast

_IS_CAST = is_cast_by_autocast("aten::rms_norm")
"""Whether autocast on CUDA computes RMSNorm in fp32; in torch 2.11 it does not."""
_unfused_rms_norm = nn.functional.rms_norm


class _FusedStorages(torch.autograd.Function):
    """Allocates the storages of the fused kernels, without computing values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        row_shape = [*x.shape[: x.ndim - num_dims], *[1] * num_dims]
        ctx.save_for_backward(x, weight, x.new_empty(row_shape, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        del gradient
        x, weight, _ = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return (
            torch.empty_like(x) if needs_x else None,
            torch.empty_like(weight) if needs_weight else None,
            None,
        )


def norm_as_on_cuda() -> None:
    """Patch RMSNorm for this process: it allocates as on CUDA and computes nothing.

    The patch is never undone, so call this only in a process forked for one estimate.
    """
    nn.functional.rms_norm = _rms_norm


def _rms_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    x, shape = input, [*normalized_shape]
    # When compiled, it is decomposed on both devices, and the compiler chooses what to keep.
    if torch.compiler.is_compiling():
        return _unfused_rms_norm(x, shape, weight, eps)
    if _IS_CAST and torch.is_autocast_enabled(x.device.type):
        x, weight = x.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype != x.dtype:  # the CUDA kernel has the same limit
        return _unfused_rms_norm(x, shape, weight, eps)
    normed: Tensor = _FusedStorages.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]
    return normed
