"""Cross-entropy loss of all models in this package.

It is a sum and not a mean, because a mean needs the count over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from axonlaunch.models.specs.model_spec import IGNORE_INDEX, ModelOutputs

MOST_LIKELY = 20
"""Number of classes that ``entropy_weights`` takes into account."""


def cross_entropy_sum(
    outputs: Tensor | ModelOutputs,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    eaft: float = 0.0,
) -> Tensor:
    """Return the summed cross entropy, in nats, of logits [..., C] and classes [...], in fp32.

    An auxiliary loss is added once for each counted target.

    Args:
        outputs: Logits, optionally with an auxiliary loss.
        targets: Classes; ``IGNORE_INDEX`` is not counted.
        label_smoothing: Share of each target's probability that is spread evenly over the C classes
            (Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7).
        z_loss: Factor of the squared log of the softmax's denominator, which is added for each
            counted target (Chowdhery et al., "PaLM", 2022, section 5).
        dft: Whether the cross entropy of each target is multiplied by the target's probability,
            without a gradient through this factor (Wu et al., "On the Generalization of SFT: A
            Reinforcement Learning Perspective with Reward Rectification", 2025, equation 9).
        eaft: Exponent of the factor ``entropy_weights``, by which the cross entropy of each target
            is multiplied; 0: no factor.

    Raises:
        ValueError: ``dft`` or ``eaft`` is combined with another term.
    """
    check_terms(label_smoothing, z_loss, dft=dft, eaft=eaft)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy_sum(logits, targets, label_smoothing, z_loss, dft=dft, eaft=eaft)

    return with_auxiliary_loss(loss, outputs, targets)


def check_terms(label_smoothing: float, z_loss: float, *, dft: bool, eaft: float) -> None:
    """Raise ``ValueError`` if a factor of plain cross entropy is combined with another term."""
    if (dft or eaft) and (label_smoothing or z_loss or (dft and eaft)):
        weighted = "dft=True" if dft else f"eaft={eaft}"
        others = f"label_smoothing={label_smoothing} and z_loss={z_loss}"
        others = f"{others}, and eaft={eaft}," if dft and eaft else others
        raise ValueError(f"{weighted} weights plain cross entropy: {others} must be 0")


def entropy_weights(highest: Tensor, exponent: float) -> Tensor:
    """Return the weights [...] of targets by the entropy of the model's most likely classes.

    A weight is ``(H / 3) ** exponent`` with the entropy H in nats of the distribution over the
    ``MOST_LIKELY`` classes, whose largest value is about 3.

    Source: entropy-adaptive fine-tuning (EAFT), as in LLaMA-Factory's ``eaft_loss_func``.

    Args:
        highest: Largest logits [..., K] in fp32 or more; -inf stands for a missing class.
    """
    entropy = torch.special.entr(highest.softmax(-1)).sum(-1)
    weights: Tensor = (entropy / 3.0) ** exponent
    return weights


def with_auxiliary_loss(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor | ModelOutputs, targets: Tensor
) -> Tensor:
    """Return the sum over counted targets plus an auxiliary loss for each counted target.

    Divided by the number of counted targets, this is the mean loss plus the auxiliary loss.

    Args:
        loss: Maps ``(logits, targets)`` to the sum.
        outputs: Logits, optionally with an auxiliary loss.
        targets: Classes.
    """
    if isinstance(outputs, Tensor):
        return loss(outputs, targets)
    counted = (targets != IGNORE_INDEX).sum()
    return loss(outputs.logits, targets) + outputs.auxiliary_loss.float() * counted


def _cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float,
    z_loss: float,
    *,
    dft: bool,
    eaft: float,
) -> Tensor:
    rows, targets = logits.flatten(0, -2).float(), targets.flatten()
    total = F.cross_entropy(
        rows,
        targets,
        ignore_index=IGNORE_INDEX,
        reduction="none" if dft or eaft else "sum",
        label_smoothing=label_smoothing,
    )
    if dft:  # targets that don't count are 0
        total = (total * total.detach().neg().exp()).sum()
    if eaft:
        highest = rows.detach().topk(min(MOST_LIKELY, rows.shape[-1]), -1).values
        total = (total * entropy_weights(highest, eaft)).sum()
    if z_loss:
        denominators = torch.logsumexp(rows, -1).masked_fill(targets == IGNORE_INDEX, 0.0)
        total = total + z_loss * denominators.square().sum()
    return total
