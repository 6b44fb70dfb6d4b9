"""Updates whose parameters or optimizer states live in host memory between steps.

One parameter at a time passes through the device, so that the device never holds more than one
parameter's states or copy. On a CPU device host and device are one and nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axonlaunch.config.optimizer import OptimizerConfig
from axonlaunch.engines.optimizer import build_optimizer
from axonlaunch.engines.update import Update

HOST = torch.device("cpu")


class StreamedUpdate(Update):
    """Runs the update on the device, one parameter after another.

    It is exact: AdamW and SGD update each parameter from its own gradient and states alone.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device,
        states_on: torch.device,
    ) -> None:
        """Prepare one optimizer a parameter.

        Args:
            config: The optimizer's figures.
            tensors: Shards by parameter name, on the host or on the device.
            device: Where the update runs.
            states_on: Where states live between updates.
        """
        self._device = device
        self._states_on = states_on
        super().__init__(config, tensors)

    def _build(self, config: OptimizerConfig) -> list[Optimizer]:
        return [build_optimizer(config, [tensor]) for tensor in self.tensors.values()]

    def _states_device(self, tensor: Tensor) -> torch.device:
        del tensor
        return self._states_on

    @torch.no_grad()
    def _step(self) -> None:
        for optimizer, tensor in zip(self.optimizers, self.tensors.values(), strict=True):
            if tensor.grad is None:
                continue
            states = optimizer.state.pop(tensor, {})
            working = nn.Parameter(moved(tensor.detach(), self._device))
            working.grad = moved(tensor.grad, self._device)
            optimizer.param_groups[0]["params"] = [working]
            optimizer.state[working] = {k: self._place(v, self._device) for k, v in states.items()}
            optimizer.step()
            if tensor.device != self._device:
                tensor.detach().copy_(moved(working.detach(), tensor.device))
            states = optimizer.state.pop(working)
            optimizer.state[tensor] = {
                k: self._place(v, self._states_on) for k, v in states.items()
            }
            optimizer.param_groups[0]["params"] = [tensor]

    @staticmethod
    def _place(value: object, device: torch.device) -> object:
        return moved(value, device) if isinstance(value, Tensor) else value


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or a DTensor's local part under the same placement, on a device."""
    if not isinstance(tensor, DTensor):
        return _copied(tensor, device)
    local = tensor.to_local()
    if local.device == device:
        return tensor
    return DTensor.from_local(
        _copied(local, device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; of a GPU's in pinned memory, which is 5 times as fast to copy.

    Source: microsoft/DeepSpeed pull request 5301.
    """
    if not (tensor.is_cuda and device.type == "cpu"):
        return tensor.to(device)
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)
