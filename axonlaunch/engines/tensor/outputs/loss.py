"""Cross entropy over logits that are sharded along the vocabulary.

A rank never holds the full logits, and at most one fp32 copy of its shard.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import collect_from, max_over, sum_over
from axonlaunch.engines.tensor.parallel_layers.local_parameters import local_entries, rank_part
from axonlaunch.engines.tensor.torch_internals import assert_on_device
from axonlaunch.models.specs.loss import MOST_LIKELY, check_terms, entropy_weights
from axonlaunch.models.specs.model_spec import IGNORE_INDEX


def vocab_parallel_cross_entropy_sum(
    logits_local: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    classes: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    eaft: float = 0.0,
) -> Tensor:
    """Return the summed cross entropy in nats, 0-dim, in fp32, the same on every rank.

    Args:
        logits_local: This rank's logits [..., C / ranks]. The last rank has fewer columns if the
            group's size does not divide C.
        targets: Target classes [...], the same on every rank. ``IGNORE_INDEX`` is not counted.
        group: The ranks among which the classes are sharded.
        classes: Total number of classes; None if every rank has equally many.
        label_smoothing: Share of each target's probability that is spread evenly over the classes.
        z_loss: Factor of the squared log of the softmax's denominator.
        dft: Whether each target's cross entropy is multiplied by the target's probability
            (``models.specs.loss.cross_entropy_sum`` has the sources of the three).
        eaft: Exponent of ``models.specs.loss.entropy_weights``, by which each target's cross
            entropy is multiplied; 0: no factor.

    Raises:
        ValueError: The shapes of logits and targets differ, the number of columns is not this
            rank's share of the classes, or ``dft`` or ``eaft`` is combined with another term.
        RuntimeError: A target is not a class (asynchronously on CUDA).
    """
    check_terms(label_smoothing, z_loss, dft=dft, eaft=eaft)
    if logits_local.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {list(logits_local.shape)} do not fit targets {list(targets.shape)}: they "
            "must agree except for the last dim"
        )
    columns = logits_local.shape[-1]
    size = columns * group.size if classes is None else classes
    if columns != (expected := rank_part(size, group)[1]):
        raise ValueError(
            f"rank {group.rank} has logits of {columns} of {size} classes, expected {expected}"
        )
    terms = label_smoothing, z_loss, dft, eaft
    loss: Tensor = _cross_entropy_sum(logits_local, targets, group, size, terms)
    return loss


def gather_logits(logits_local: Tensor, *, group: ProcessGroup, classes: int) -> Tensor:
    """Gather the ranks' shards [..., classes / ranks] to the full logits [..., classes]."""
    length = -(-classes // group.size)
    if padding := length - logits_local.shape[-1]:  # only on the last rank
        logits_local = F.pad(logits_local, (0, padding))
    return collect_from(logits_local, group, -1)[..., :classes]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: ProcessGroup,
        classes: int,
        terms: tuple[float, float, bool, float],
    ) -> Tensor:
        smoothing, z_loss, dft, eaft = terms
        counted = targets != IGNORE_INDEX
        is_class = (targets >= 0) & (targets < classes)
        assert_on_device((is_class | ~counted).all(), "a target is not in the vocabulary")
        local_targets, elsewhere = local_entries(targets, group, size=classes)
        local_targets, elsewhere = local_targets.unsqueeze(-1), elsewhere.unsqueeze(-1)
        # Type promotion converts half precision to fp32 in the subtraction, without a copy
        # beforehand.
        precision = torch.promote_types(logits.dtype, torch.float32)
        highest = max_over(logits.amax(-1, keepdim=True).to(precision), group)
        weights = _entropy_weights(logits, group, classes, eaft) if eaft else None
        exponents = logits - highest
        target_logits = exponents.gather(-1, local_targets).masked_fill_(elsewhere, 0.0)
        if smoothing:
            spread = smoothing / classes * exponents.sum(-1, keepdim=True)
            target_logits = (1 - smoothing) * target_logits + spread
        exponents.exp_()
        stacked = torch.stack((exponents.sum(-1, keepdim=True), target_logits))
        total, target_logits = sum_over(stacked, group)
        uncounted = ~counted.unsqueeze(-1)
        losses = total.log() - target_logits
        weights = losses.neg().exp() if dft else weights
        if weights is not None:
            losses *= weights
        log_denominators = total.log() + highest if z_loss else None
        if log_denominators is not None:
            losses += z_loss * log_denominators.square()
        loss: Tensor = losses.masked_fill(uncounted, 0.0).sum()
        if ctx.needs_input_grad[0]:
            # softmax - target, the gradient up to a factor, is written over the exponentials. It is
            # saved in the type of the logits, because the gradient must have that type anyway.
            gradient = exponents.div_(total)
            if log_denominators is not None:  # z_loss * log(denominator)^2
                gradient *= 1 + 2 * z_loss * log_denominators
            if smoothing:
                gradient -= smoothing / classes
            targets_here = (1 - smoothing) * (elsewhere.to(precision) - 1.0)
            gradient.scatter_add_(-1, local_targets, targets_here)
            if weights is not None:
                gradient *= weights
            ctx.save_for_backward(gradient.masked_fill_(uncounted, 0.0).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (difference,) = ctx.saved_tensors
        # A factor with a dim takes part in type promotion, so it is not rounded to half precision.
        logits_gradient = torch.empty_like(difference)
        torch.mul(difference, gradient.view(1), out=logits_gradient)
        return logits_gradient, None, None, None, None


_cross_entropy_sum: Any = _CrossEntropySum.apply


def _entropy_weights(logits: Tensor, group: ProcessGroup, classes: int, exponent: float) -> Tensor:
    """Return the weights [..., 1] by the most likely classes, which several ranks may have."""
    count = min(MOST_LIKELY, classes)
    here = logits.topk(min(count, logits.shape[-1]), -1).values
    here = here.to(torch.promote_types(logits.dtype, torch.float32))
    here = F.pad(here, (0, count - here.shape[-1]), value=float("-inf"))
    highest = collect_from(here, group, -1).topk(count, -1).values
    return entropy_weights(highest, exponent).unsqueeze(-1)
