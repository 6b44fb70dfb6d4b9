"""A dispatch mode that stays out of what torch.compile does.

What a mode does with an operation is its subclass'.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class UncompiledDispatchMode(TorchDispatchMode):
    """Sees operations when they run, and not while they are traced or compiled."""

    # Of an operator that runs others no more is seen than what it returns.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without what keeps Dynamo out of ``__torch_dispatch__``, at a fifth of its time."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled be compiled; torch asks every mode."""
        return True
