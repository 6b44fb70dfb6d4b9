"""Cross entropy over logits whose vocabulary is divided among ranks.

Neither the whole logits nor more than one fp32 copy of this rank's ever exist on a rank.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import collect_from, max_over, sum_over
from axonlaunch.engines.tensor.local_parameters import own_entries, rank_part
from axonlaunch.engines.tensor.torch_internals import assert_on_device
from axonlaunch.models.spec import IGNORE_INDEX


def vocab_parallel_cross_entropy_sum(
    logits_local: Tensor, targets: Tensor, *, group: ProcessGroup, classes: int | None = None
) -> Tensor:
    """Return the summed cross entropy in nats, 0-dim, in fp32, the same on every rank.

    Args:
        logits_local: This rank's columns [..., C / ranks] of the logits; the last rank has fewer
            where its size does not divide them.
        targets: Classes [...], the same on every rank; ``IGNORE_INDEX`` does not count.
        group: The ranks that divide the classes.
        classes: How many they are over all ranks; None: each rank has as many.

    Raises:
        ValueError: Logits and targets are of different shapes, or a rank's logits are not its part.
        RuntimeError: A target is no class (on CUDA, when the device gets there).
    """
    if logits_local.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {list(logits_local.shape)} do not fit targets {list(targets.shape)}: they "
            "must agree but for the last dim"
        )
    seen = logits_local.shape[-1]
    size = seen * group.size if classes is None else classes
    if seen != (part := rank_part(size, group)[1]):
        raise ValueError(f"rank {group.rank} has {seen} of {size} classes; {part} are its part")
    loss: Tensor = _cross_entropy_sum(logits_local, targets, group, size)
    return loss


def gather_logits(logits_local: Tensor, *, group: ProcessGroup, classes: int) -> Tensor:
    """Return the logits [..., classes] of which ranks have the parts [..., classes / ranks]."""
    length = -(-classes // group.size)
    if short := length - logits_local.shape[-1]:  # of the last rank, so that it ends the whole
        logits_local = F.pad(logits_local, (0, short))
    return collect_from(logits_local, group, -1)[..., :classes]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup, classes: int
    ) -> Tensor:
        counted = targets != IGNORE_INDEX
        known = (targets >= 0) & (targets < classes)
        assert_on_device((known | ~counted).all(), "a target is not in the vocabulary")
        mine, elsewhere = own_entries(targets, group, size=classes)
        mine, elsewhere = mine.unsqueeze(-1), elsewhere.unsqueeze(-1)
        # Promotion lifts half precision to fp32 in the subtraction itself, without a copy before.
        precision = torch.promote_types(logits.dtype, torch.float32)
        highest = max_over(logits.amax(-1, keepdim=True).to(precision), group)
        exponents = logits - highest
        of_target = exponents.gather(-1, mine).masked_fill_(elsewhere, 0.0)
        exponents.exp_()
        both = torch.stack((exponents.sum(-1, keepdim=True), of_target))
        total, of_target = sum_over(both, group)
        uncounted = ~counted.unsqueeze(-1)
        loss: Tensor = (total.log() - of_target).masked_fill(uncounted, 0.0).sum()
        if ctx.needs_input_grad[0]:
            # softmax - onehot, the gradient but for a factor, where the exponentials were; kept as
            # coarse as the logits, for the gradient has to be.
            softmax = exponents.div_(total)
            softmax.scatter_add_(-1, mine, elsewhere.to(precision) - 1.0)
            ctx.save_for_backward(softmax.masked_fill_(uncounted, 0.0).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (difference,) = ctx.saved_tensors
        return difference * gradient.to(difference.dtype), None, None, None


_cross_entropy_sum: Any = _CrossEntropySum.apply
