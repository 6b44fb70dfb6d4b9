"""Checks that outputs of a causal model do not depend on later tokens or other documents.

A comparison of layouts cannot show this, because all layouts run the same model. The check changes
some tokens of a sample and compares the outputs at other positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.models.modules.attention import Attention

_SAME = 1e-3
"""Relative change of outputs that rounding of kernels explains."""


def lookahead_problem(model: nn.Module, batch: Batch, outputs_of: Callable[[Batch], Tensor]) -> str:
    """Describe a forbidden dependence of outputs on tokens, or return an empty string.

    Only models with the package's ``Attention`` are checked, and only if all of it is causal.

    Args:
        model: Model to check.
        batch: Tokens of shape [B, T]; packed rows have positions.
        outputs_of: Maps a batch to the model's outputs, of shape [B, T, ...].
    """
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    if not parts or not all(part.causal for part in parts) or batch.inputs.ndim != 2:
        return ""
    sample = batch.rows(0, 1)
    length = sample.inputs.shape[1]
    middle, positions = length // 2, range(length)
    expected = outputs_of(sample)
    if _changes(
        sample, expected, outputs_of, changed=positions[middle:], compared=positions[:middle]
    ):
        return "the model: outputs depend on tokens that come later"
    if sample.positions is None:
        return ""
    starts = [start for start in (sample.positions[0] == 0).nonzero().flatten().tolist() if start]
    for start in starts[:1]:
        first, later = positions[:start], positions[start:]
        if _changes(sample, expected, outputs_of, changed=first, compared=later):
            return "the model: outputs depend on tokens of another document"
    return ""


def _changes(
    sample: Batch,
    expected: Tensor,
    outputs_of: Callable[[Batch], Tensor],
    *,
    changed: range,
    compared: range,
) -> bool:
    """Return whether outputs at ``compared`` change when tokens at ``changed`` are replaced.

    All of them are replaced by the first token of ``compared``.
    """
    inputs = sample.inputs.clone()
    inputs[:, changed.start : changed.stop] = inputs[:, compared.start]
    outputs = outputs_of(replace(sample, inputs=inputs))
    one, other = (o[:, compared.start : compared.stop].float() for o in (expected, outputs))
    distance = torch.linalg.vector_norm(one - other)
    return bool(distance > _SAME * torch.linalg.vector_norm(one))
