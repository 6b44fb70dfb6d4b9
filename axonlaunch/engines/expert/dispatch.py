"""Sends hidden states to the ranks of their experts and brings the results back."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import exchange_rows
from axonlaunch.config.problems.errors import PlainError
from axonlaunch.engines.expert import routing


class LostRowsError(PlainError, RuntimeError):
    """A registered dispatch returned another number of rows than it got, or dropped rows."""


class Dispatch(Protocol):
    """Moves rows between the ranks that share the experts of a layer.

    ``send`` and ``combine`` alternate. Both are differentiable, and every rank of the group must
    call them.
    """

    def send(self, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, object]:
        """Send each token to the ranks of its experts.

        Args:
            hidden: Hidden states [T, H].
            experts: Experts of each token [T, K], numbered over all ranks.

        Returns:
            Received rows [M, H] with M of at least 1; for each the index of its expert among this
            rank's experts, [M]; and what ``combine`` needs.
        """
        ...

    def combine(self, results: Tensor, weights: Tensor, ticket: object) -> Tensor:
        """Bring results back and add up those of each token.

        Args:
            results: Result of each received row, [M, H].
            weights: Factors of each token's experts, [T, K].
            ticket: The third result of ``send``.

        Returns:
            Weighted sums [T, H], in the type of the results.
        """
        ...


class AllToAll:
    """Exchanges rows with one all-to-all in each direction."""

    def __init__(self, group: ProcessGroup, *, num_experts: int) -> None:
        """Create the dispatch of a layer.

        Args:
            group: The ranks that share the experts, in the order of the experts.
            num_experts: Number of experts of all these ranks.
        """
        self._group, self._num_experts = group, num_experts

    def send(self, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, object]:
        """See ``Dispatch.send``."""
        top_k = experts.shape[-1]
        routes = routing.exchange_routes(experts, num_experts=self._num_experts, group=self._group)
        rows = hidden[routes.order // top_k]
        rows = exchange_rows(rows, self._group, sent=routes.sent, received=routes.received)
        local_experts = routes.local_experts
        if not sum(routes.received):
            # Experts need a row: without one, their weights would have no gradients on this rank,
            # and products of empty matrices have none in torch 2.13.
            rows = functional.pad(rows, (0, 0, 0, 1))
            local_experts = local_experts.new_zeros(1)
        return rows, local_experts, routes

    def combine(self, results: Tensor, weights: Tensor, ticket: object) -> Tensor:
        """See ``Dispatch.combine``."""
        assert isinstance(ticket, routing.Routes)
        results = results[: sum(ticket.received)]
        rows = exchange_rows(results, self._group, sent=ticket.received, received=ticket.sent)
        # Unlike index_copy, this does not keep the sorted rows for backward.
        unsorted = rows.new_empty(rows.shape).index_put((ticket.order,), rows)
        by_token = unsorted.view(*weights.shape, rows.shape[-1])
        return (by_token * weights.unsqueeze(-1)).sum(1).to(results.dtype)
