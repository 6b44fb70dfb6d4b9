"""Exchanges how many tokens each rank sends to each expert of the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import exchange_rows


class InvalidRouteError(RuntimeError):
    """A router chose an expert that does not exist."""


@dataclass(frozen=True)
class Routes:
    """Rows that this rank sends and receives.

    Attributes:
        order: Order in which this rank's rows [N] are sent: sorted by expert, stable.
        sent: Number of rows sent to each rank.
        received: Number of rows received from each rank.
        local_experts: For each received row, the index of its expert among this rank's experts,
            [sum(received)].
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    local_experts: Tensor


def exchange_routes(experts: Tensor, *, num_experts: int, group: ProcessGroup) -> Routes:
    """Find out which rows this rank sends and receives; every rank of the group must call this.

    The host waits once, because the sizes of the next exchange must be known to it.

    Args:
        experts: Expert of each row, [N] int64, below ``num_experts``.
        num_experts: Number of experts of all ranks of the group; rank ``r`` holds those from
            ``r * num_experts / size``.
        group: The ranks that share the experts.

    Raises:
        InvalidRouteError: An expert is negative or too large.
    """
    per_rank = num_experts // group.size
    # A last bin counts the invalid ones, because an index out of bounds would abort a GPU.
    is_valid = (experts >= 0) & (experts < num_experts)
    bins = torch.where(is_valid, experts, num_experts)
    counts = bins.new_zeros(num_experts + 1).scatter_add_(0, bins, torch.ones_like(bins))
    each = [per_rank] * group.size
    theirs = exchange_rows(counts[:num_experts], group, sent=each, received=each)
    numbers = torch.cat([counts, theirs]).tolist()
    if numbers[num_experts]:
        row = int((~is_valid).nonzero()[0])
        raise InvalidRouteError(
            f"expert {int(experts[row])} of row {row} does not exist; there are {num_experts}, "
            "counted from 0"
        )
    local = torch.arange(per_rank, device=experts.device).repeat(group.size)
    return Routes(
        order=experts.argsort(stable=True),
        sent=_sums(numbers[:num_experts], per_rank),
        received=_sums(numbers[num_experts + 1 :], per_rank),
        local_experts=local.repeat_interleave(theirs, output_size=sum(numbers[num_experts + 1 :])),
    )


def _sums(numbers: list[int], length: int) -> list[int]:
    return [sum(numbers[start : start + length]) for start in range(0, len(numbers), length)]
