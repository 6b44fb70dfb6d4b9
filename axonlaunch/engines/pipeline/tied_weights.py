"""Keeps tied weights on different pipeline stages equal by summing their gradients.

Both copies start with the same values (the initializer's ``key``) and get the sum of both
gradients, so identical optimizers keep them equal. Parameters are never copied between stages.

Source: Shoeybi et al., "Megatron-LM", 2019, embeddings on the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.mesh import local_part
from axonlaunch.engines.data_parallel.gradient_shares import no_gradient


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return ``{other name: first name}`` of parameters that a full model holds under two names."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


class TiedGradients:
    """Sums the gradients of the two copies of each tied weight."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        ties: Mapping[str, str],
        owners: Mapping[str, int],
        group: ProcessGroup,
    ) -> None:
        """Find the copies on this rank.

        Args:
            parameters: Parameters, or shards of them, that this rank updates, by name.
            ties: ``{other name: first name}`` over all stages.
            owners: Global rank of ``group`` that holds each tied name.
            group: The ranks of the pipeline.
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
        """Replace both gradients by their sum. Every rank that holds a copy must call it."""
        for first, other, first_owner, other_owner in self._pairs:
            if first_owner == other_owner:
                first_gradient, other_gradient = self._gradient(first), self._gradient(other)
                first_gradient.add_(other_gradient)
                other_gradient.copy_(first_gradient)
                continue
            local_name = first if first in self._parameters else other
            peer = other_owner if local_name == first else first_owner
            gradient = self._gradient(local_name)
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
            parameter.grad = no_gradient(parameter)
        return local_part(parameter.grad)
