"""A dispatch that counts its exchanges."""

from __future__ import annotations

from torch import Tensor

import axonlaunch as ax


@ax.register_dispatch("counted")
class Counted(ax.AllToAll):
    """One all-to-all in each direction, counted."""

    sends = 0

    def send(self, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, object]:
        """Count, and send each token to the ranks of its experts."""
        Counted.sends += 1
        return super().send(hidden, experts)
