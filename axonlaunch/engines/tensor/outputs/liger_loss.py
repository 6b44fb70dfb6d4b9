"""Computes head and cross entropy with Liger-Kernel's fused kernels (``train.loss_kernel``).

Forward computes the logits in chunks of tokens, and the gradients of hidden states and of the head
from them, so that backward only multiplies these by the gradient of the loss.

Source: Hsu et al., "Liger Kernel", 2024, section 3.2.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from axonlaunch.config.registry import Needs
from axonlaunch.engines.tensor.outputs.deferred_head import DeferredHead, RowLoss
from axonlaunch.models.specs.model_spec import IGNORE_INDEX

LinearCrossEntropy = Callable[..., Tensor]
"""Has the arguments and the result of ``linear_cross_entropy_sum``."""

_REQUIREMENT = "axonlaunch[kernels]"
_LIGER = Needs("liger_kernel", "liger-kernel", _REQUIREMENT, oldest=(0, 8))
_TRITON = Needs("triton", "triton", _REQUIREMENT)


def liger_problem(device: str) -> str:
    """Return why Liger's kernels can't be used on a device; empty if they can."""
    if problem := _LIGER.problem() or _TRITON.problem():
        return problem
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "Liger's kernels run on GPUs, and the ranks compute on the CPU; use null, or set "
            "TRITON_INTERPRET=1 in the environment, with which Triton interprets them, slowly"
        )
    return ""


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
) -> Tensor:
    """Return the summed cross entropy of a linear head in fp32, 0-dim.

    Args:
        hidden: Hidden states [N, hidden].
        weight: Weight of the head [C, hidden].
        bias: Bias of the head [C].
        targets: Classes [N]; ``IGNORE_INDEX`` is not counted.
        label_smoothing: See ``models.specs.loss.cross_entropy_sum``, also for the other two.
        z_loss: Factor of the squared log of the softmax's denominator.
        dft: Whether the loss of each target is multiplied by the target's probability.
    """
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        reduction="sum",
        accum_dtype=torch.float32,  # of the head's gradient, over chunks
        use_token_scaling=dft,
    )
    total: Tensor = loss(weight, hidden, targets, bias)
    return total


def with_kernel(kernel: LinearCrossEntropy, **terms: float) -> RowLoss:
    """Return the loss of hidden states that a kernel computes together with the head.

    Args:
        kernel: Computes head and loss.
        terms: Terms that the kernel adds to cross entropy, by name.
    """
    return partial(_sum_by_kernel, partial(kernel, **terms))


def _sum_by_kernel(
    kernel: LinearCrossEntropy, head: DeferredHead, rows: Tensor, targets: Tensor
) -> Tensor:
    with head.linear() as (weight, bias):
        if torch.is_grad_enabled() and not rows.requires_grad:
            # Liger computes gradients only if the hidden states need one.
            rows = rows.detach().requires_grad_(weight.requires_grad)
        return kernel(rows.contiguous(), weight, bias, targets)
