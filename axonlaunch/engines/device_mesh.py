"""The device mesh: which ranks hold the same shard and which divide a copy among them.

It lays ranks out; it wraps no model.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.argument_checks import device_of
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.mesh import Mesh
from axonlaunch.comm.process_group import disjoint_group
from axonlaunch.config.data_parallel import DATA_PARALLEL
from axonlaunch.config.layout import Layout


def run_mesh(world: World, layout: Layout, *, cpu_offload: str) -> Mesh:
    """Return the mesh of a run: axes pp, dp_replicate, dp_shard, tp.

    Context ranks are neighbours within a data axis: what sums gradients or divides parameters over
    data ranks does so over them too. ``context_group`` distinguishes them.

    Args:
        world: Its ranks; all of them call this.
        layout: The run's.
        cpu_offload: What sharded parameters leave in host memory, as the run's configuration says.
    """
    sizes = dict(layout.axes)
    sizes["dp_replicate" if layout.replicates_context else "dp_shard"] *= sizes.pop("cp")
    # What is divided has a mesh of its axis even where that has one rank.
    keep: tuple[str, ...] = ()
    if layout.facts.shards_parameters:
        keep = ("dp_shard",)
    elif layout.facts.shards_optimizer:
        keep = ("dp_replicate",)
    # Stages send each other the shapes of what they pass in an evaluation. A variant of somebody
    # else's may average states that its optimizer keeps on the host.
    with_host = ["pp"]
    if layout.facts.shards_parameters and cpu_offload != "none":
        with_host += ["dp_shard", "tp"]
    if DATA_PARALLEL.entry(layout.data_parallel).target is not None:
        with_host += ["dp_replicate"]
    # A layer waits for what its tensor ranks sum; gathers and reductions of the data ranks, which
    # are for later layers, would take the multiprocessors first.
    return world.lay_out(sizes, keep=keep, urgent=("tp",), with_host=tuple(with_host))


def context_group(world: World, layout: Layout) -> ProcessGroup:
    """Return the ranks that share this rank's sequences."""
    step = layout.tensor
    first = world.rank - world.rank // step % layout.context * step
    ranks = [first + step * place for place in range(layout.context)]
    backend = "nccl" if world.backend is Backend.NCCL else None
    return disjoint_group(ranks, name="cp", timeout_s=world.timeout_s, backend=backend)


def sharding_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the part of a run's mesh that ``fully_shard`` divides parameters over."""
    if mesh.size("dp_replicate") > 1:
        return mesh.device_mesh["dp_replicate", "dp_shard"]
    return mesh.device_mesh["dp_shard"]


def data_mesh(
    group: ProcessGroup, *, replicate: int, shard: int, timeout_s: float | None = None
) -> DeviceMesh:
    """Return the mesh of ``replicate`` copies of ``shard`` ranks each, shards innermost.

    With one copy the mesh has the axis ``dp_shard`` alone.

    Args:
        group: Who shares a model.
        replicate: Copies.
        shard: Ranks of a copy.
        timeout_s: How long a collective of copies or of shards waits; None: as long as torch says.

    Raises:
        ValueError: The two do not multiply to the group, or copies are to be of a part of the
            world, whose ranks would have to be grouped again by all others.
    """
    if replicate * shard != group.size:
        raise ValueError(f"{replicate} x {shard} ranks are not the group's {group.size}")
    kind, is_world = device_of(group).type, group.size == dist.get_world_size()
    if replicate == 1 and is_world:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("dp_shard",))
    if replicate == 1:
        return DeviceMesh.from_group(group.torch_group, kind, mesh_dim_names=("dp_shard",))
    if not is_world:
        raise ValueError(
            f"{replicate} replicas over ranks {list(group.ranks)}, a part of the world: give "
            "mesh=world.mesh(...).device_mesh[...] in place of the group"
        )
    sizes = {"dp_replicate": replicate, "dp_shard": shard}
    rank, keep = dist.get_rank(), tuple(sizes)
    return Mesh(sizes, rank=rank, device_type=kind, keep=keep, timeout_s=timeout_s).device_mesh
