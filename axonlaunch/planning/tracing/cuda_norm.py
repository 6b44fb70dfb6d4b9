"""What RMSNorm holds on a GPU, where a run for one is traced on a CPU.

CUDA builds of torch have one kernel for it since 2.9, which keeps its input and a number for each
row; a CPU computes it in steps and keeps two of them in fp32. Other norms are one operation on
either.

Source: PyTorch 2.11 and 2.13, ``rms_norm_symint`` in ``aten/src/ATen/native/layer_norm.cpp``;
``FusedRmsNormBackward0`` in the headers of their wheels names what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.models.torch_internals import is_cast_by_autocast

_IS_CAST = is_cast_by_autocast("aten::rms_norm")
"""Whether CUDA's autocast computes it in fp32; torch 2.11's does not."""
_in_steps = nn.functional.rms_norm


class _Fused(torch.autograd.Function):
    """As much storage as the kernels take, and no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        each_row = [*x.shape[: x.ndim - num_dims], *[1] * num_dims]
        ctx.save_for_backward(x, weight, x.new_empty(each_row, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        del gradient
        x, weight, _ = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return (
            torch.empty_like(x) if of_x else None,
            torch.empty_like(weight) if of_weight else None,
            None,
        )


def norm_as_on_cuda() -> None:
    """Let RMSNorm hold what it holds on CUDA, and compute nothing; for a process of its own."""
    nn.functional.rms_norm = _rms_norm


def _rms_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    x, shape = input, [*normalized_shape]
    # A compiler takes it apart on either, and keeps what it finds best.
    if torch.compiler.is_compiling():
        return _in_steps(x, shape, weight, eps)
    if _IS_CAST and torch.is_autocast_enabled(x.device.type):
        x, weight = x.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype != x.dtype:  # nor does CUDA's kernel take these
        return _in_steps(x, shape, weight, eps)
    normed: Tensor = _Fused.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]
    return normed
