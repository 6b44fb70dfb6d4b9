"""The device mesh: which ranks hold the same shard and which divide a copy among them.

It lays ranks out; it wraps no model.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axonlaunch.comm import World
from axonlaunch.comm.mesh import Mesh
from axonlaunch.config.layout import Layout

# Axes whose mesh the engine of a kind needs even where it has one rank.
_KEPT = {"fsdp": ("dp_shard",), "zero1": ("dp_replicate",)}


def run_mesh(world: World, shares: Layout) -> Mesh:
    """Return the mesh of a run: axes pp, dp_replicate, dp_shard, cp, tp."""
    return Mesh(world, shares.axes, keep=_KEPT.get(shares.data_parallel, ()))


def sharding_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the part of a run's mesh that ``fully_shard`` divides parameters over."""
    if mesh.size("dp_replicate") > 1:
        return mesh.device_mesh["dp_replicate", "dp_shard"]
    return mesh.device_mesh["dp_shard"]


def data_mesh(world: World, *, replicate: int, shard: int) -> DeviceMesh:
    """Return the mesh of ``replicate`` copies of ``shard`` ranks each, shards innermost.

    With one copy the mesh has the axis ``dp_shard`` alone.

    Raises:
        ValueError: The two do not multiply to the world.
    """
    if replicate * shard != world.world_size:
        raise ValueError(f"{replicate} x {shard} ranks are not the world's {world.world_size}")
    kind = world.device.type
    if replicate == 1:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(kind, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
