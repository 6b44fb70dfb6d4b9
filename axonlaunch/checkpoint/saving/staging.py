"""Copies a run's state to host memory so that a save can be written while training continues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch.comm.mesh import local_part
from axonlaunch.models.tensors.dtensor_regions import dtensor_of
from axonlaunch.models.tensors.page_locked import page_locked

_Name = tuple[str, ...]


class HostCopies:
    """Copies states to host memory, from a GPU into page-locked buffers that later copies reuse.

    Without page-locked memory, CUDA copies through a small buffer and the host waits for each
    tensor. Without reuse, each page of new memory costs a page fault.
    """

    def __init__(self) -> None:
        self._kept: dict[_Name, Tensor] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a complete copy of a state; it may overwrite the previously returned copy.

        Args:
            state: Nested dictionary of tensors.
        """
        devices: set[torch.device] = set()
        copied = self._copy_state(state, (), devices)
        for device in devices:
            _wait(device)
        return copied

    def _copy_state(
        self, state: dict[str, Any], name: _Name, devices: set[torch.device]
    ) -> dict[str, Any]:
        return {
            key: self._copy_state(value, (*name, key), devices)
            if isinstance(value, dict)
            else self._on_host(value.detach(), (*name, key), devices)
            for key, value in state.items()
        }

    def _on_host(self, tensor: Tensor, name: _Name, devices: set[torch.device]) -> Tensor:
        part = local_part(tensor)
        if part.device.type == "cpu":
            return tensor.to("cpu", copy=True)
        copy = self._kept.get(name)
        if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
            like = torch.empty(part.shape, dtype=part.dtype, device="meta")
            self._kept[name] = copy = page_locked(like)
        copy.copy_(part, non_blocking=True)
        devices.add(part.device)
        if not isinstance(tensor, DTensor):
            return copy
        return dtensor_of(
            copy,
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def _wait(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()
