"""Finds out whether registered dispatches dropped rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.expert.dispatch import Dispatch, LostRowsError


class RowCounts:
    """Counts the rows that a dispatch sent to each expert of a layer, less those that arrived.

    Counting needs no collective, and the host does not wait for the device.

    Attributes:
        dispatch: Moves the rows.
        group: The ranks that share the experts, in the order of the experts.
        missing: For each expert of the group, the rows that this rank sent less those that it
            received, [E]; None if there were no rows since the last check.
    """

    def __init__(self, dispatch: Dispatch, group: ProcessGroup, *, num_experts: int) -> None:
        """Start without rows."""
        self.dispatch, self.group = dispatch, group
        self.missing: Tensor | None = None
        self._num_experts = num_experts

    def add(self, experts: Tensor, local_experts: Tensor) -> None:
        """Count the rows of one exchange.

        Args:
            experts: Experts of this rank's tokens, [T, K].
            local_experts: For each received row, the index among this rank's experts, [M].
        """
        if self.missing is None:
            self.missing = experts.new_zeros(self._num_experts)
        sent = experts.flatten()
        received = local_experts + self.group.rank * (self._num_experts // self.group.size)
        self.missing.scatter_add_(0, sent, torch.ones_like(sent))
        self.missing.scatter_add_(0, received, torch.full_like(received, -1))


def require_all_rows(counts: Mapping[str, RowCounts]) -> None:
    """Refuse a dispatch that dropped rows since the last check, and start anew.

    Every rank that shares these experts must call this. The host waits for the device.

    Args:
        counts: Counts by the name of the layer, all over the same ranks.

    Raises:
        LostRowsError: An expert received fewer rows than tokens chose it.
    """
    missing = {name: each.missing for name, each in counts.items() if each.missing is not None}
    if not missing:
        return
    together = torch.cat([*missing.values()])
    dist.all_reduce(together, group=next(iter(counts.values())).group.torch_group)
    totals = together.split([len(each) for each in missing.values()])
    for name, total in zip(missing, totals, strict=True):
        counts[name].missing = None
        # A dispatch may add rows, whose number is negative here.
        if lost := int(total.clamp(min=0).sum()):
            raise LostRowsError(
                f"{type(counts[name].dispatch).__name__}.send of strategy.expert.dispatch lost "
                f"rows for {name}: {lost} since the last logged step; it must drop no token"
            )
