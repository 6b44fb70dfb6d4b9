"""Ranks laid out on named axes, and the process group of each axis.

It lays ranks out; what a group is for is the engines' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from axonlaunch.comm.process_group import (
    ProcessGroup,
    default_group,
    disjoint_group,
    lone_group,
)


class Mesh:
    """Where this rank stands on each axis, and with whom it shares it.

    Ranks count along the last axis first, so the last one stays within a node.

    Attributes:
        sizes: Ranks along each axis, outermost first; their product is the world.
        device_mesh: torch's mesh, without the axes of one rank; all of them if every axis has one.
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
        """Lay the default group's ranks out; every rank calls this.

        Args:
            sizes: Ranks along each axis, outermost first.
            rank: This process's in the default group.
            device_type: Where its tensors are, ``cpu`` or ``cuda``.
            keep: Axes that stay in ``device_mesh`` even with one rank.
            urgent: Axes whose collectives run on streams of high priority; NCCL alone has any.
            with_host: Of a world on NCCL, the axes whose groups carry the host's tensors too, and
                connect their ranks by gloo for that. None: every group carries what the world does.
            timeout_s: How long a collective of an axis waits; None: as long as torch says.

        Raises:
            ValueError: The sizes don't multiply to the world.
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
        # Axes of one rank are left out: what torch does along them are copies.
        shown = {n: s for n, s in sizes.items() if s > 1 or n in keep} or dict(sizes)
        self._groups = {
            axis: self._join(
                axis,
                with_host=with_host,
                options=_high_priority() if axis in urgent else None,
                timeout_s=timeout_s,
            )
            for axis in sizes
        }
        # torch's ``init_device_mesh`` would split gloo's part of a world on NCCL along every axis,
        # and take no time limit.
        self.device_mesh: DeviceMesh = DeviceMesh.from_group(
            [self._groups[axis].torch_group for axis in shown],
            device_type,
            torch.arange(world_size, device="cpu").view(*shown.values()),
            mesh_dim_names=tuple(shown),
        )

    def _join(
        self,
        axis: str,
        *,
        with_host: tuple[str, ...] | None,
        options: Any,
        timeout_s: float | None,
    ) -> ProcessGroup:
        """Return the group of the ranks that differ from this one on an axis alone."""
        size = self.sizes[axis]
        if size == dist.get_world_size():
            return default_group()  # nothing competes with it either
        if size == 1:
            # A communicator of NCCL would be split off the world's, by all of its ranks.
            return lone_group(self._rank, backend=None if with_host is None else "gloo")
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
        """Return where this rank stands on an axis, from 0."""
        names = list(self.sizes)
        inner = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        return self._rank // inner % self.sizes[axis]

    def along(self, *axes: str) -> int:
        """Return this rank's place among those that differ on some axes, the last fastest."""
        place = 0
        for axis in axes:
            place = place * self.sizes[axis] + self.coordinate(axis)
        return place

    def group(self, axis: str) -> ProcessGroup:
        """Return the ranks that differ from this one on one axis alone.

        Raises:
            KeyError: There is no such axis.
        """
        if axis not in self.sizes:
            raise KeyError(f"no axis {axis}; this mesh has {', '.join(self.sizes)}")
        return self._groups[axis]

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"Mesh({axes})"


def _high_priority() -> Any:
    """Return NCCL's options of a group whose kernels a GPU schedules before those of others."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
