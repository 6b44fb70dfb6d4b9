"""Keeps a router's choice of experts when a block is computed again.

A rounding error can change the order of two close scores. The recomputed block would then send
tokens to other experts than the forward did.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

from torch import Tensor

from axonlaunch.models.modules.topk_choices import TopkChoices

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keep_choices(contexts: Callable[[], Contexts] | None, *, num_experts: int) -> Contexts:
    """Return contexts of a forward and of its recomputation that choose the same experts.

    Only the indices are kept. The values are gathered again, because routers change them in place.

    Args:
        contexts: Returns other contexts of forward and recomputation, entered first.
        num_experts: Largest number of scores of a choice. Choices of more scores are made again,
            for example those of tokens in sparse attention.
    """
    kept: list[Tensor] = []
    others: tuple[Any, ...] = (None, None) if contexts is None else contexts()
    modes = (
        _KeepChoices(kept, most_scores=num_experts),
        _TakeChoices(kept, most_scores=num_experts),
    )
    forward, again = (_Both(other, mode) for other, mode in zip(others, modes, strict=True))
    return forward, again


class _KeepChoices(TopkChoices):
    """Appends the indices of each choice to a list."""

    def __init__(self, kept: list[Tensor], *, most_scores: int) -> None:
        super().__init__(most_scores=most_scores)
        self._kept = kept

    def choose(self, scores: Tensor, make: Callable[[], Tensor]) -> Tensor:
        del scores
        self._kept.append(make())
        return self._kept[-1]


class _TakeChoices(TopkChoices):
    """Takes the indices from a list. It can be entered several times, once per backward."""

    def __init__(self, kept: list[Tensor], *, most_scores: int) -> None:
        super().__init__(most_scores=most_scores)
        self._kept = kept

    def __enter__(self) -> Self:
        self._next = iter(self._kept)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def choose(self, scores: Tensor, make: Callable[[], Tensor]) -> Tensor:
        del scores, make
        return next(self._next)


class _Both:
    """Enters an optional context, then another one. It can be entered several times."""

    def __init__(self, outer: AbstractContextManager[Any] | None, inner: Any) -> None:
        self._outer, self._inner = outer, inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack = ExitStack()
        if self._outer is not None:
            self._stack.enter_context(self._outer)
        self._stack.enter_context(self._inner)

    def __exit__(self, *details: Any) -> bool | None:
        return self._stack.__exit__(*details)
