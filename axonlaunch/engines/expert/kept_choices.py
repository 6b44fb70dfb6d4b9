"""Keeps a router's choice of experts when a block is computed again.

A rounding error can change the order of two close scores. The recomputed block would then send
tokens to other experts than the forward did.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = {torch.topk, Tensor.topk}
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
    choices = (_Choices(kept, num_experts), _KeptChoices(kept, num_experts))
    forward, again = (_Both(other, mode) for other, mode in zip(others, choices, strict=True))
    return forward, again


class _Choices(TorchFunctionMode):
    """Appends the indices of each choice to a list."""

    def __init__(self, kept: list[Tensor], num_experts: int) -> None:
        super().__init__()
        self._kept, self._num_experts = kept, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        call = partial(func, *args, **(kwargs or {}))
        if func not in _TOPK:
            return call()
        dim = call.keywords.get("dim", args[2] if len(args) > 2 else -1)
        scores: Tensor = args[0] if args else call.keywords["input"]
        if scores.shape[dim] > self._num_experts:
            return call()
        chosen = self._choose(call)
        return torch.return_types.topk((scores.gather(dim, chosen), chosen))

    def _choose(self, call: Callable[[], Any]) -> Tensor:
        with torch.no_grad():
            chosen: Tensor = call().indices
        self._kept.append(chosen)
        return chosen


class _KeptChoices(_Choices):
    """Takes the indices from the list. It can be entered several times, once per backward."""

    def __enter__(self) -> Self:
        self._next = iter(self._kept)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _choose(self, call: Callable[[], Any]) -> Tensor:
        del call
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
