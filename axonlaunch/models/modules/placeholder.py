"""Placeholder for a module that another pipeline stage holds."""

from __future__ import annotations

from typing import Any

from torch import nn


class Placeholder(nn.Module):
    """Placeholder for a module on another stage: same attributes, no parameters.

    ``ModelSpec.blocks`` skips placeholders.
    """

    def __init__(self, absent: nn.Module) -> None:
        super().__init__()
        self._absent = (absent.to("meta"),)  # a tuple, so it is not a submodule

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the absent module; models read, for example, the kind of a block."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            (absent,) = self.__dict__.get("_absent", (None,))
            return getattr(absent, name)
