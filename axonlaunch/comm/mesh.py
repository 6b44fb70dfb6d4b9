"""Arranges ranks on named axes with a process group each, and finds their parts of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from axonlaunch.comm.process_group import (
    ProcessGroup,
    default_group,
    disjoint_group,
    single_rank_group,
)


class Mesh:
    """Coordinates of this rank on each axis, and the groups along the axes.

    Consecutive ranks are neighbors along the last axis, so that its groups stay within a node.

    Attributes:
        sizes: Number of ranks along each axis, outermost first; their product is the world size.
        device_mesh: torch's mesh without axes of one rank; with all axes if every axis has one
            rank.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        rank: int,
        device_type: str,
        keep: tuple[str, ...] = (),
        urgent: tuple[str, ...] = (),
        with_host: tuple[str, ...] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Arrange the default group's ranks; every rank must call this.

        Args:
            sizes: Number of ranks along each axis, outermost first.
            rank: Rank of this process in the default group.
            device_type: Type of the ranks' devices, ``cpu`` or ``cuda``.
            keep: Axes that stay in ``device_mesh`` even if they have one rank.
            urgent: Axes with collectives on high-priority streams; only for NCCL.
            with_host: Axes with groups that also communicate CPU tensors, over gloo connections, in
                a world on NCCL. None gives every group the world's backends.
            timeout_s: Timeout in seconds of a collective along an axis; None for torch's default.

        Raises:
            ValueError: The product of the sizes is not the world size.
        """
        world_size = dist.get_world_size()
        if math.prod(sizes.values()) != world_size:
            product = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(
                f"{product} is {math.prod(sizes.values())}, not the world's {world_size} "
                "ranks; make the product equal"
            )
        self.sizes = dict(sizes)
        self._rank = rank
        # Axes of one rank are left out, because torch makes copies along them.
        mesh_axes = {n: s for n, s in sizes.items() if s > 1 or n in keep} or dict(sizes)
        self._groups = {
            axis: self._join(
                axis,
                with_host=with_host,
                options=_high_priority() if axis in urgent else None,
                timeout_s=timeout_s,
            )
            for axis in sizes
        }
        # In a world on NCCL, torch's ``init_device_mesh`` would create a gloo group on every axis,
        # and it accepts no timeout.
        self.device_mesh: DeviceMesh = DeviceMesh.from_group(
            [self._groups[axis].torch_group for axis in mesh_axes],
            device_type,
            torch.arange(world_size, device="cpu").view(*mesh_axes.values()),
            mesh_dim_names=tuple(mesh_axes),
        )

    def _join(
        self,
        axis: str,
        *,
        with_host: tuple[str, ...] | None,
        options: Any,
        timeout_s: float | None,
    ) -> ProcessGroup:
        """Return the group of the ranks that differ from this one only on an axis."""
        size = self.sizes[axis]
        if size == dist.get_world_size():
            return default_group()  # no other group competes with it
        if size == 1:
            # For an NCCL group, all ranks would have to split the world's communicator.
            return single_rank_group(self._rank, backend=None if with_host is None else "gloo")
        names = list(self.sizes)
        step = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        first = self._rank - self.coordinate(axis) * step
        return disjoint_group(
            range(first, first + step * size, step),
            name=axis,
            backend=None if with_host is None or axis in with_host else "nccl",
            options=options,
            timeout_s=timeout_s,
        )

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.sizes[axis]

    def coordinate(self, axis: str) -> int:
        """Return this rank's index along an axis."""
        names = list(self.sizes)
        inner = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        return self._rank // inner % self.sizes[axis]

    def along(self, *axes: str) -> int:
        """Return this rank's index along several axes combined; the last axis is fastest."""
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + self.coordinate(axis)
        return index

    def group(self, axis: str) -> ProcessGroup:
        """Return the group of the ranks that differ from this one only on one axis.

        Raises:
            KeyError: The axis does not exist.
        """
        if axis not in self.sizes:
            raise KeyError(f"no axis {axis}; this mesh has {', '.join(self.sizes)}")
        return self._groups[axis]

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"Mesh({axes})"


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiable; return other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _high_priority() -> Any:
    """Return NCCL options for a group with kernels that a GPU schedules before others."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
