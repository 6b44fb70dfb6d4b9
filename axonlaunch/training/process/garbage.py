"""Runs Python's garbage collection in the same steps on all ranks.

By default each rank collects at different times, and every time all other ranks wait for it.

Source: pytorch/torchtitan, ``torchtitan/tools/utils.py``, ``GarbageCollection``.
"""

from __future__ import annotations

import gc

_YOUNG = 1
"""Oldest generation that is collected. Garbage of a step is young, and a full collection, which
visits all imported objects, takes as long as several steps."""


class GarbageCollection:
    """Context in which Python's garbage collector runs only every few steps."""

    def __init__(self, every: int) -> None:
        """Prepare the collector.

        Args:
            every: Number of steps between collections; 0 leaves the timing to Python.
        """
        self._every = every
        self._was_enabled = False

    def step_done(self, step: int) -> None:
        """Collect garbage if the step is a multiple of ``every``."""
        if self._every and step % self._every == 0:
            gc.collect(_YOUNG)

    def __enter__(self) -> GarbageCollection:
        """Disable automatic collection."""
        if self._every:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect(_YOUNG)
        return self

    def __exit__(self, *error: object) -> None:
        """Enable automatic collection again if it was enabled before."""
        if self._was_enabled:
            gc.enable()
