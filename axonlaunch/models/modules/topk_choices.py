"""Intercepts ``torch.topk`` and ``torch.max`` of few scores, by which routers choose experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = {torch.topk, Tensor.topk}
_MAX = {torch.max, Tensor.max}
"""Phimoe chooses one expert at a time. With ``keepdim``, a maximum is for scaling scores."""
_CHOICES = _TOPK | _MAX


def is_choice(scores: Tensor, dim: int, *, most_scores: int) -> bool:
    """Return whether ``topk`` of these scores chooses experts, by their number.

    Args:
        scores: Scores [..., N].
        dim: Dimension in which the best scores are chosen; choices are made in the last one.
        most_scores: Largest number of scores of a choice.
    """
    return dim in (-1, scores.ndim - 1) and scores.shape[-1] <= most_scores


class TopkChoices(TorchFunctionMode):
    """Lets ``choose`` determine the indices of each choice that this thread makes inside.

    The values are gathered from the scores, with the same gradients as those of ``torch.topk``.
    """

    def __init__(self, *, most_scores: int) -> None:
        """Create the mode.

        Args:
            most_scores: Largest number of scores of a choice that is intercepted. Sparse attention
                chooses among more, namely tokens.
        """
        super().__init__()
        self._most_scores = most_scores

    def choose(self, scores: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the indices of a choice, by default the best ones.

        Args:
            scores: Scores [..., N].
            make: Returns the indices [..., K] of the best scores.
        """
        del scores
        return make()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept one call."""
        del types
        if func not in _CHOICES:
            return func(*args, **(kwargs or {}))
        call = partial(func, *args, **(kwargs or {}))
        scores: Tensor = args[0] if args else call.keywords["input"]
        is_max = func in _MAX
        position, default = (1, None) if is_max else (2, -1)
        dim: Any = call.keywords.get("dim", args[position] if len(args) > position else default)
        keeps_dim = is_max and (call.keywords.get("keepdim") or len(args) > position + 1)
        if keeps_dim or not isinstance(dim, int):
            return call()
        if not is_choice(scores, dim, most_scores=self._most_scores):
            return call()

        def make() -> Tensor:
            with torch.no_grad():
                indices: Tensor = call().indices
            return indices.unsqueeze(-1) if is_max else indices

        chosen = self.choose(scores, make)
        values = scores.gather(-1, chosen)
        if is_max:
            return torch.return_types.max((values.squeeze(-1), chosen.squeeze(-1)))
        return torch.return_types.topk((values, chosen))
