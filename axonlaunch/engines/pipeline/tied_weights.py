"""Tied weights whose two ends live on different pipeline stages: kept equal by equal gradients.

Both ends start alike (the initializer's ``key``) and get the sum of both gradients, so the same
optimizer keeps them equal; nothing is copied between them.

Source: Shoeybi et al., "Megatron-LM", 2019, embeddings on the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.optimizer.clipping import local_part


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return ``{other name: first name}`` of parameters that a whole module holds twice."""
    first: dict[int, str] = {}
    owners: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            owners[name] = first[id(parameter)]
    return owners


class TiedGradients:
    """Sums the gradients of the two ends of each tied weight."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        ties: Mapping[str, str],
        owners: Mapping[str, int],
        group: ProcessGroup,
    ) -> None:
        """Find the ends that this rank holds.

        Args:
            parameters: What this rank updates, by name: parameters, or rows of them.
            ties: ``{other name: first name}`` over all stages.
            owners: The global rank of ``group`` that holds each tied name.
            group: The pipeline's ranks.
        """
        self._parameters = parameters
        self._group = group
        self._pairs = [
            (first, other, owners[first], owners[other])
            for other, first in ties.items()
            if first in parameters or other in parameters
        ]

    @torch.no_grad()
    def sync(self) -> None:
        """Give both ends the sum; the ranks that hold one call this."""
        for first, other, first_owner, other_owner in self._pairs:
            if first_owner == other_owner:
                here, there = self._gradient(first), self._gradient(other)
                here.add_(there)
                there.copy_(here)
                continue
            mine = first if first in self._parameters else other
            peer = other_owner if mine == first else first_owner
            gradient = self._gradient(mine)
            received = torch.empty_like(gradient)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, gradient.clone(), peer, self._group.torch_group),
                    dist.P2POp(dist.irecv, received, peer, self._group.torch_group),
                ]
            )
            for work in works:
                work.wait()
            gradient.add_(received)

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local_part(parameter.grad)
