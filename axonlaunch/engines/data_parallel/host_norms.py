"""Computes norms of gradients in host memory while backward computes other gradients.

With parameters on the host, ``fully_shard`` copies the gradients of a unit to page-locked memory
after they were reduced. A thread waits for the copies of each unit and computes their norms, so
that only those of the last unit remain after backward. The norms are exact: they are computed by
the same function from the same values. Hooks of parameters are not used, because then backward
would wait for each copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.engines.data_parallel.fsdp import FSDP
from axonlaunch.engines.data_parallel.torch_internals import (
    call_after_reduction,
    number_of_changes,
)
from axonlaunch.engines.optimizer.clipping import norm_on_host


class HostNorms:
    """Norms of the gradients that arrived on the host in a backward of one micro-batch."""

    def __init__(self, sharded: Iterable[FSDP]) -> None:
        """Observe the backward of sharded modules.

        Args:
            sharded: Modules with parameters on the host and a device that computes.
        """
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="axonlaunch-norms")
        self._arrived: dict[Tensor, _Arrived] = {}
        for module in sharded:
            for unit in module.units():
                call_after_reduction(unit, self._begin)

    def take(self) -> dict[Tensor, Tensor]:
        """Return the norms by parameter, 0-dim, and forget them.

        Gradients that were replaced or changed since they arrived are left out.
        """
        arrived, self._arrived = self._arrived, {}
        return {
            parameter: each.norm.result()
            for parameter, each in arrived.items()
            if each.is_gradient_of(parameter)
        }

    def _begin(self, copied: Any, parameters: Sequence[Tensor]) -> None:
        """Begin to compute norms of a unit's gradients.

        Args:
            copied: Event after the copies of the gradients.
            parameters: Parameters of the unit with copied gradients.
        """
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            norm = self._worker.submit(_norm_after, copied, local_part(gradient))
            changes = number_of_changes(local_part(gradient))
            self._arrived[parameter] = _Arrived(gradient, changes, norm)


@dataclass(frozen=True)
class _Arrived:
    """A gradient in host memory, its number of changes when it arrived, and its norm."""

    gradient: Tensor
    changes: int
    norm: Future[Tensor]

    def is_gradient_of(self, parameter: Tensor) -> bool:
        """Return whether the parameter still has this gradient with the same values."""
        if parameter.grad is not self.gradient:
            return False
        return number_of_changes(local_part(self.gradient)) == self.changes


@torch.no_grad()
def _norm_after(copied: Any, gradient: Tensor) -> Tensor:
    copied.synchronize()
    return norm_on_host(gradient)


def host_norms_of(
    config: RunConfig, layout: Layout, sharded: Sequence[FSDP], device: torch.device
) -> HostNorms | None:
    """Return the norms of gradients that arrive on the host; None if there are none.

    There are none without clipping, on a CPU, and with several micro-batches, whose gradients are
    added up on the host, so that backward waits for each copy.

    Args:
        config: Configuration of the run.
        layout: Layout of the run.
        sharded: This rank's sharded modules.
        device: Device that computes.
    """
    arrives = device.type != "cpu" and any(m.cpu_offload.keeps_parameters_on_host for m in sharded)
    needs_scale = PRECISIONS[config.train.precision].needs_loss_scale
    is_needed = config.train.grad_clip is not None or needs_scale
    is_single = layout.micro_batches == layout.pipeline == 1
    return HostNorms(sharded) if arrives and is_needed and is_single else None
