"""When Python looks for cycles: every so many steps on all ranks, rather than whenever one fills.

A rank that looks while the others do not is waited for by all of them.

Source: pytorch/torchtitan, ``torchtitan/tools/utils.py``, ``GarbageCollection``.
"""

from __future__ import annotations

import gc

_YOUNG = 1
"""Generation up to which is looked: what a step leaves behind is young, and to go through all that
was ever imported takes as long as some steps."""


class GarbageCollection:
    """Takes over Python's collector for a training loop; a context."""

    def __init__(self, every: int) -> None:
        """Prepare.

        Args:
            every: Steps from one look to the next; 0: Python decides, as anywhere else.
        """
        self._every = every
        self._was_enabled = False

    def step_done(self, step: int) -> None:
        """Look, if it is time."""
        if self._every and step % self._every == 0:
            gc.collect(_YOUNG)

    def __enter__(self) -> GarbageCollection:
        """Stop Python from looking by itself."""
        if self._every:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect(_YOUNG)
        return self

    def __exit__(self, *error: object) -> None:
        """Let Python look again, if it did before."""
        if self._was_enabled:
            gc.enable()
