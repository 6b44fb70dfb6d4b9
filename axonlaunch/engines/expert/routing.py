"""Exchanges how many tokens each rank sends to each expert of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import exchange_rows
from axonlaunch.config.problems.errors import PlainError


class InvalidRouteError(PlainError, RuntimeError):
    """A router chose an expert that does not exist, or gave it a weight that is not finite.

    Attributes:
        token: Index of the token in the micro-batch, whose samples follow each other.
        row: Index of its sample in this rank's batch; None if unknown.
        micro_batch: Index of the micro-batch in a round of a pipeline; 0 without one.
    """

    def __init__(self, message: str, *, token: int, row: int | None = None) -> None:
        super().__init__(message)
        self.token, self.row, self.micro_batch = token, row, 0

    @classmethod
    def of_layer(cls, layer: str, reason: str, *, token: int) -> Self:
        """Return the error for a token of the layer with this full name."""
        message = f"the router of {layer} gives an invalid route to token {token}: {reason}"
        return cls(message, token=token)


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

    Each pair of a token and one of its experts is a row.

    Args:
        experts: Different experts of each token, [T, K] int64, below ``num_experts``.
        num_experts: Number of experts of all ranks of the group; rank ``r`` holds those from
            ``r * num_experts / size``.
        group: The ranks that share the experts.

    Raises:
        InvalidRouteError: An expert is negative or too large.
    """
    per_rank, rows = num_experts // group.size, experts.flatten()
    # A last bin counts the invalid ones, because an index out of bounds would abort a GPU.
    bins = torch.where(_is_invalid(rows, num_experts), num_experts, rows)
    counts = bins.new_zeros(num_experts + 1).scatter_add_(0, bins, torch.ones_like(bins))
    each = [per_rank] * group.size
    received_counts = exchange_rows(counts[:num_experts], group, sent=each, received=each)
    sent, received = read_counts(counts, received_counts, experts=experts, group=group)
    if sent[num_experts]:
        token, message = invalid_expert(experts, num_experts=num_experts)
        raise InvalidRouteError(message, token=token)
    local = torch.arange(per_rank, device=experts.device).repeat(group.size)
    return Routes(
        order=rows.argsort(stable=True),
        sent=_sums(sent[:num_experts], per_rank),
        received=_sums(received, per_rank),
        local_experts=local.repeat_interleave(received_counts, output_size=sum(received)),
    )


def choice_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the experts of each token, [T, K], from the arguments of a module of experts."""
    choice: Tensor = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
    return choice


def route_weights_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the weights of these experts, [T, K], from the same arguments."""
    weights: Tensor = kwargs["top_k_weights"] if "top_k_weights" in kwargs else args[-1]
    return weights


def invalid_expert(experts: Tensor, *, num_experts: int) -> tuple[int, str]:
    """Return the first token with an expert that does not exist, and what is wrong with it.

    Args:
        experts: Experts of each token, [T, K], at least one of which does not exist.
        num_experts: Number of experts that exist.
    """
    rows = experts.flatten()
    row = int(_is_invalid(rows, num_experts).nonzero()[0])
    message = f"expert {int(rows[row])} does not exist; there are {num_experts}, from 0 on"
    return row // experts.shape[-1], message


@contextmanager
def naming_invalid_route(layer: str, experts: Tensor, *, num_experts: int) -> Iterator[None]:
    """Replace an error that an invalid expert caused.

    Choices are looked at only after an error, because each check makes the host wait. On GPUs
    torch's error stays, because no values can be read after it.

    Args:
        layer: Full name of the module of experts.
        experts: Experts of each token, [T, K].
        num_experts: Number of experts that exist.

    Raises:
        InvalidRouteError: The error was caused by such an expert.
    """
    try:
        yield
    except (RuntimeError, IndexError):
        is_on_host = experts.device.type == "cpu"
        if is_on_host and _is_invalid(experts, num_experts).any():
            token, reason = invalid_expert(experts, num_experts=num_experts)
            raise InvalidRouteError.of_layer(layer, reason, token=token) from None
        raise


def read_counts(
    sent: Tensor, received: Tensor, *, experts: Tensor, group: ProcessGroup
) -> tuple[list[int], list[int]]:
    """Return two lists of numbers of rows to the host, which waits for them once.

    An estimate replaces this function, because its tensors have no values.

    Args:
        sent: Rows of this rank for each expert of the group, and invalid rows, [E + 1].
        received: Rows from each rank for each expert of this rank, [E].
        experts: Experts of this rank's tokens, [T, K].
        group: The ranks that share the experts.
    """
    del experts, group
    numbers: list[int] = torch.cat([sent, received]).tolist()
    return numbers[: len(sent)], numbers[len(sent) :]


def _sums(numbers: list[int], length: int) -> list[int]:
    return [sum(numbers[start : start + length]) for start in range(0, len(numbers), length)]


def _is_invalid(experts: Tensor, num_experts: int) -> Tensor:
    return (experts < 0) | (experts >= num_experts)
