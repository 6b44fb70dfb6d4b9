"""Ranks laid out on named axes, and the process group of each axis.

It lays ranks out; what a group is for is the engines' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axonlaunch.comm.process_group import ProcessGroup
from axonlaunch.comm.torch_compat import set_timeout


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
        timeout_s: float | None = None,
    ) -> None:
        """Lay the default group's ranks out; every rank calls this.

        Args:
            sizes: Ranks along each axis, outermost first.
            rank: This process's in the default group.
            device_type: Where its tensors are, ``cpu`` or ``cuda``.
            keep: Axes that stay in ``device_mesh`` even with one rank.
            urgent: Axes whose collectives run on streams of high priority; NCCL alone has any.
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
        self._groups: dict[str, ProcessGroup] = {}
        # Axes of one rank are left out: torch would make a process group for each rank of them.
        shown = {n: s for n, s in sizes.items() if s > 1 or n in keep} or dict(sizes)
        # Nothing competes with an axis that is the whole world, whose group it shares.
        prioritised = [axis for axis in urgent if 1 < sizes[axis] < world_size]
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type,
            tuple(shown.values()),
            mesh_dim_names=tuple(shown),
            backend_override={axis: _high_priority(timeout_s) for axis in prioritised} or None,
        )
        if timeout_s is not None:
            for axis in shown:
                set_timeout(self.device_mesh.get_group(axis), timeout_s)

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
        if axis not in self._groups:
            if axis in (self.device_mesh.mesh_dim_names or ()):
                self._groups[axis] = ProcessGroup.from_torch(self.device_mesh.get_group(axis))
            else:
                alone = dist.new_group([self._rank], use_local_synchronization=True)
                self._groups[axis] = ProcessGroup((self._rank,), alone)
        return self._groups[axis]

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"Mesh({axes})"


def _high_priority(timeout_s: float | None) -> Any:
    """Return NCCL's options of a group whose kernels a GPU schedules before those of others."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if timeout_s is not None:  # torch takes the group's time limit from here
        options._timeout = timedelta(seconds=timeout_s)
    return options
