"""Base class of dispatch modes that do not interfere with torch.compile.

Subclasses define ``__torch_dispatch__``.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class UncompiledDispatchMode(TorchDispatchMode):
    """A mode that sees operations when they run, but not while they are traced or compiled."""

    # The mode sees the results of a higher-order operator, but not the operations inside it.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip torch's Dynamo guard of ``__torch_dispatch__``, which takes a fifth of its time."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compilation while this mode is active; torch asks every active mode."""
        return True
