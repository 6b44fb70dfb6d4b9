"""An optimizer's step that sees one parameter at a time, elsewhere or in another type.

A copy stands in for each parameter during its update, so that no more than one copy exists; on a
GPU one of each that arrives, is updated and leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axonlaunch.engines.optimizer.copy_streams import copy_streams
from axonlaunch.models.dtensor_regions import dtensor_of
from axonlaunch.models.page_locked import page_locked

STREAMED: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose step streams."""


def stream_parameters(
    optimizer: Optimizer,
    *,
    device: torch.device | None = None,
    states_on: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Let an optimizer's step pass one parameter after another through a device, or another type.

    Only for optimizers that update each parameter from its own gradient and states alone, as
    torch's all do but LBFGS.

    Args:
        optimizer: Its parameters are on the host or on the device.
        device: Where the update runs; None: where the parameter is.
        states_on: Where states live between updates; None: where the update runs.
        dtype: Type of the update and its states; None: the parameter's.
    """
    update = optimizer.step
    streams = copy_streams(device)

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        with streams.arriving():
                            target = device or tensor.device
                            working, before = _brought(self, tensor, target, dtype)
                        self.param_groups = [{**group, "params": [working]}]
                        update()
                        used = (working, working.grad, dict(self.state[working]))
                        with streams.leaving(*used):
                            _taken_back(self, tensor, working, states_on or working.device, before)
        finally:
            self.param_groups = groups
            streams.finish()
        return loss

    # A method, as torch's schedulers of learning rates expect.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    STREAMED.add(optimizer)


def _brought(
    optimizer: Optimizer, tensor: Tensor, device: torch.device, dtype: torch.dtype | None
) -> tuple[Tensor, dict[str, object]]:
    """Return a stand-in of a parameter on a device, and the states that it has elsewhere.

    It has its gradient and states.
    """
    dtype = dtype or tensor.dtype
    working = nn.Parameter(moved(tensor.detach(), device).to(dtype))
    assert tensor.grad is not None
    working.grad = moved(tensor.grad, device).to(dtype)
    states = optimizer.state.pop(tensor, {})
    optimizer.state[working] = {k: _place(v, device) for k, v in states.items()}
    return working, states


@torch.no_grad()
def _taken_back(
    optimizer: Optimizer,
    tensor: Tensor,
    working: Tensor,
    states_on: torch.device,
    before: dict[str, object],
) -> None:
    """Copy an updated stand-in, and its states, back to its parameter.

    Host memory that held a state before the update holds it again: to lock other memory for each
    would take longer than the copy. The host does not wait for what is copied to it.
    """
    if tensor.device != working.device or tensor.dtype != working.dtype:
        _copy(working.detach(), tensor.detach())
    states = optimizer.state.pop(working)
    optimizer.state[tensor] = {
        key: _back(value, states_on, before.get(key)) for key, value in states.items()
    }


def _back(value: object, device: torch.device, pinned: object) -> object:
    """Return a state where it is kept, in the tensor that held it if there is one."""
    if not isinstance(value, Tensor) or not isinstance(pinned, Tensor) or value.device == device:
        return _place(value, device)
    if (pinned.device, pinned.shape, pinned.dtype) != (device, value.shape, value.dtype):
        return _place(value, device)
    _copy(value, pinned)
    return pinned


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy values to a tensor of the same division."""
    if isinstance(source, DTensor) and isinstance(target, DTensor):
        source, target = source.to_local(), target.to_local()
    target.copy_(source, non_blocking=True)


def _place(value: object, device: torch.device) -> object:
    return moved(value, device) if isinstance(value, Tensor) else value


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or a DTensor's local part under the same placement, on a device."""
    if not isinstance(tensor, DTensor):
        return _copied(tensor, device)
    local = tensor.to_local()
    if local.device == device:
        return tensor
    return dtensor_of(
        _copied(local, device),
        tensor.device_mesh,
        tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from a GPU into page-locked memory, which is 5 times as fast.

    Source: microsoft/DeepSpeed pull request 5301.
    """
    if not (tensor.is_cuda and device.type == "cpu"):
        return tensor.to(device, non_blocking=True)  # to a device: its later work comes after it
    return page_locked(torch.empty_like(tensor, device="meta")).copy_(tensor)
