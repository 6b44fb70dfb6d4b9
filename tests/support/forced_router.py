"""Replaces the choices of all routers by given loads, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.expert import routing


@contextmanager
def forced_routes(load: float) -> Iterator[None]:
    """Send ``load`` times the rows of a balanced router to the first rank of each expert group."""
    exchange = routing.exchange_routes

    def forced(experts: Tensor, *, num_experts: int, group: ProcessGroup) -> Any:
        chosen = forced_experts(*experts.shape, num_experts, group.size, load=load)
        return exchange(chosen, num_experts=num_experts, group=group)

    routing.exchange_routes = forced
    try:
        yield
    finally:
        routing.exchange_routes = exchange


def forced_experts(tokens: int, top_k: int, num_experts: int, ranks: int, *, load: float) -> Tensor:
    """Return different experts for each token, [tokens, top_k]; the first ones are on rank 0."""
    if load == 1:
        return torch.arange(tokens * top_k).view(tokens, top_k) % num_experts
    per_rank = num_experts // ranks
    most = min(top_k, per_rank)
    wanted = min(load * tokens * top_k / ranks, tokens * most)
    chosen = []
    for token in range(tokens):
        here = round(wanted * (token + 1) / tokens) - round(wanted * token / tokens)
        others = num_experts - per_rank
        elsewhere = [per_rank + (token + n) % others for n in range(top_k - here)]
        chosen.append([*range(here), *elsewhere])
    return torch.tensor(chosen)
