"""Counts the functional collectives that a piece of code runs, by name."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts the collectives of the current thread, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.names.append(func.name().partition("::")[2].rstrip("_"))
        return func(*args, **(kwargs or {}))
