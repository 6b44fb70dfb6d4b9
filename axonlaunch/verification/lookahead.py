"""Whether a causal model sees later tokens or other documents, which comparing can't show.

It looks at outputs alone, of a sample whose tokens are changed in one part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from axonlaunch.data.dataset import Batch
from axonlaunch.models.attention import Attention

_SAME = 1e-3
"""Of the outputs' size: what kernels may round otherwise beside other tokens."""


def foresight(model: nn.Module, batch: Batch, outputs_of: Callable[[Batch], Tensor]) -> str:
    """Say which tokens a model knows that it should not; empty if none, or if it is not ours.

    Args:
        model: In which ``Attention`` says whether it is causal.
        batch: Tokens [B, T]; packed rows have positions.
        outputs_of: What the model gives of a batch, [B, T, ...].
    """
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    if not parts or not all(part.causal for part in parts) or batch.inputs.ndim != 2:
        return ""
    sample = batch.rows(0, 1)
    length = sample.inputs.shape[1]
    middle, everywhere = length // 2, range(length)
    expected = outputs_of(sample)
    if _changes(
        sample, expected, outputs_of, changed=everywhere[middle:], seen=everywhere[:middle]
    ):
        return "the model: outputs depend on tokens that come later"
    if sample.positions is None:
        return ""
    begins = [place for place in (sample.positions[0] == 0).nonzero().flatten().tolist() if place]
    for start in begins[:1]:
        here, there = everywhere[:start], everywhere[start:]
        if _changes(sample, expected, outputs_of, changed=here, seen=there):
            return "the model: outputs depend on tokens of another document"
    return ""


def _changes(
    sample: Batch,
    expected: Tensor,
    outputs_of: Callable[[Batch], Tensor],
    *,
    changed: range,
    seen: range,
) -> bool:
    """Say whether outputs change somewhere when tokens in another place are the first one of it."""
    inputs = sample.inputs.clone()
    inputs[:, changed.start : changed.stop] = inputs[:, seen.start]
    outputs = outputs_of(replace(sample, inputs=inputs))
    one, other = (o[:, seen.start : seen.stop].float() for o in (expected, outputs))
    apart = torch.linalg.vector_norm(one - other)
    return bool(apart > _SAME * torch.linalg.vector_norm(one))
