"""Computes what Liger's kernel for head and loss computes, with torch's operations.

Triton's kernels can't run on tensors without values. This allocates the same memory in the same
order, so that a traced step has the peak of a real one.

Source: ``liger_kernel/ops/fused_linear_cross_entropy.py`` of Liger-Kernel 0.8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axonlaunch.models.specs.model_spec import IGNORE_INDEX


def fused_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    on_gpu: bool = False,
) -> Tensor:
    """Return what ``liger_loss.linear_cross_entropy_sum`` returns.

    Args:
        hidden: See there, also for the others except the last.
        on_gpu: Whether products are written to existing memory, as Liger does on GPUs.
    """
    terms = label_smoothing, z_loss, dft, on_gpu
    total: Tensor = _fused_cross_entropy_sum(hidden, weight, bias, targets, terms)
    return total


class _FusedCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        terms: tuple[float, float, bool, bool],
    ) -> Tensor:
        smoothing, z_loss, dft, on_gpu = terms
        needs_gradient, trains_head = hidden.requires_grad, weight.requires_grad
        # Rows per chunk, so that the logits are about as large as the hidden states.
        rows, (classes, width) = len(hidden), weight.shape
        chunk = min(rows, _power_of_two(_ceil(rows, _ceil(classes, width))))
        of_hidden = torch.zeros_like(hidden)
        of_weight = of_bias = None
        if needs_gradient:
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_head else None
            of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        losses = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        counted = targets != IGNORE_INDEX
        is_in_place = on_gpu and hidden.dtype == weight.dtype
        buffer = hidden.new_empty((chunk, classes)) if is_in_place and bias is None else None
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            if buffer is None:
                logits = hidden[part] @ weight.t()
                logits = logits if bias is None else logits + bias
            else:
                logits = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - start])
            losses[part] = _to_gradient(
                logits, targets[part], counted[part], smoothing, z_loss, dft
            )
            if not needs_gradient:
                continue
            if is_in_place:
                torch.mm(logits, weight, out=of_hidden[part])
            else:
                of_hidden[part] = logits @ weight
            if of_weight is not None:
                if on_gpu and logits.dtype != torch.float32:
                    factors = logits.t(), hidden[part].to(logits.dtype)
                    torch.addmm(of_weight, *factors, out_dtype=torch.float32, out=of_weight)
                else:
                    of_weight += torch.mm(logits.t(), hidden[part].to(logits.dtype)).float()
            if of_bias is not None:
                of_bias += logits.sum(0)
            del logits
        del buffer
        kept = [
            None if gradient is None else gradient.to(parameter.dtype)
            for gradient, parameter in [(of_weight, weight), (of_bias, bias)]
            if parameter is not None
        ]
        ctx.save_for_backward(of_hidden, *kept)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_hidden, of_weight, *of_bias = ctx.saved_tensors
        for tensor in (of_hidden, of_weight, *of_bias):
            if tensor is not None:
                tensor.mul_(gradient)
        return of_hidden, of_weight, *(of_bias or [None]), None, None


_fused_cross_entropy_sum: Any = _FusedCrossEntropySum.apply


def _to_gradient(
    logits: Tensor, targets: Tensor, counted: Tensor, smoothing: float, z_loss: float, dft: bool
) -> Tensor:
    """Return the losses [N] of logits [N, C], which become their gradient in place."""
    indices = targets.where(counted, 0).unsqueeze(-1)
    weights = counted.float()
    if dft:
        weights *= logits.clone().softmax(-1).gather(-1, indices).squeeze(-1)
    denominators = logits.logsumexp(-1).float()
    losses = denominators - (1 - smoothing) * logits.gather(-1, indices).squeeze(-1)
    losses += z_loss * denominators.square() - smoothing * logits.mean(-1, dtype=torch.float32)
    logits.sub_(denominators.unsqueeze(-1)).exp_()
    logits.mul_((1 + 2 * z_loss * denominators).unsqueeze(-1)).sub_(smoothing / logits.shape[-1])
    logits.scatter_(-1, indices, smoothing - 1.0, reduce="add")
    logits.mul_(weights.unsqueeze(-1))
    return losses * weights


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least a number."""
    return 1 << (number - 1).bit_length()
