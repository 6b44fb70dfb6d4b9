"""Works on gradients as they arrive in host memory, while backward computes other gradients.

With parameters on the host, ``fully_shard`` copies the gradients of a unit to page-locked memory
after they were reduced. A thread waits for the copies of each unit and computes the norms of its
gradients, or updates its parameters if no norm is needed, so that only the last unit remains after
backward. Values are exact: the same functions compute them from the same gradients. Hooks of
parameters are not used, because then backward would wait for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.optimization.optimizer import OptimizerConfig
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.engines.data_parallel.fsdp import FSDP
from axonlaunch.engines.data_parallel.torch_internals import (
    call_after_reduction,
    number_of_changes,
)
from axonlaunch.engines.optimizer.clipping import norm_on_host
from axonlaunch.engines.optimizer.in_backward import UpdateInBackward


class HostNorms:
    """Norms of the gradients that arrived on the host in a backward of one micro-batch."""

    def __init__(self, units: Iterable[FSDPModule], *, device: torch.device) -> None:
        """Observe the backward of sharded units.

        Args:
            units: Units with parameters on the host.
            device: Device that computes.
        """
        self._worker = _worker(device)
        self._arrived: dict[Tensor, _Arrived] = {}
        for unit in units:
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


class UpdateOnArrival(UpdateInBackward):
    """Updates the parameters of a unit on the host when its gradients have arrived there.

    Parameters whose gradients do not arrive by themselves are updated after backward, as all of
    them are if the device is a CPU.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Mapping[str, Tensor],
        *,
        units: Iterable[FSDPModule],
        device: torch.device,
        parameters: Mapping[str, ParameterFacts] | None = None,
        seed: int = 0,
    ) -> None:
        """Create the optimizers and observe the backward.

        Args:
            config: Configuration of the optimizer.
            tensors: Shards by parameter name, on the host.
            units: Sharded units of the parameters.
            device: Device that computes.
            parameters: Facts about the parameters, see ``Update``.
            seed: Seed of random numbers, see ``Update``.
        """
        self._worker = _worker(device)
        self._updates: list[Future[None]] = []
        self._steps: dict[Tensor, Callable[[Tensor], None]] = {}
        super().__init__(config, tensors, parameters=parameters, seed=seed)
        for unit in units:
            call_after_reduction(unit, self._begin)

    def apply(
        self, *, rate: Callable[[float], float], step: int = 1, skip: Tensor | None = None
    ) -> None:
        """Wait for the updates of the backward, and do those that remain."""
        self.finish()
        for tensor, update_one in self._steps.items():
            if tensor.grad is not None:
                update_one(tensor)
        super().apply(rate=rate, step=step, skip=skip)

    def finish(self) -> None:
        """Wait for the updates of the backward."""
        updates, self._updates = self._updates, []
        for update in updates:
            update.result()

    def forget_gradients(self) -> None:
        """Wait for the updates of the backward, and free the other gradients."""
        self.finish()
        super().forget_gradients()

    def _call_when_complete(self, tensor: Tensor, update_one: Callable[[Tensor], None]) -> None:
        self._steps[tensor] = update_one

    def _begin(self, copied: Any, parameters: Sequence[Tensor]) -> None:
        """Begin to update the parameters of a unit; takes the arguments of ``HostNorms._begin``."""
        steps = [partial(self._steps[parameter], parameter) for parameter in parameters]
        self._updates.append(self._worker.submit(_update_after, copied, steps))


@torch.no_grad()
def _update_after(copied: Any, steps: Iterable[Callable[[], None]]) -> None:
    copied.synchronize()
    for step in steps:
        step()


def _worker(device: torch.device) -> ThreadPoolExecutor:
    """Return one thread that waits for events of a device."""
    name = "axonlaunch-host"
    if device.type == "cpu":
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    # A new thread uses device 0, where its first wait would allocate some 500 MB for each rank.
    use_device, index = torch.accelerator.set_device_index, device.index or 0
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=use_device, initargs=(index,))


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
    if not (arrives and is_needed and is_single):
        return None
    units = (unit for module in sharded for unit in module.units())
    return HostNorms(units, device=device)
