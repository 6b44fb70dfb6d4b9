"""Creates device meshes: which ranks replicate parameters and which shard them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.backend import Backend
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.comm.mesh import Mesh
from axonlaunch.comm.process_group import disjoint_group
from axonlaunch.config.axes import EXPERT, EXPERT_SHARD
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.options.data_parallel import DATA_PARALLEL


def run_mesh(world: World, layout: Layout, *, cpu_offload: str) -> Mesh:
    """Return the mesh of a run, with axes pp, dp_replicate, dp_shard, tp.

    Context-parallel ranks are neighbors within a data axis, see ``Layout.mesh_sizes``.
    ``merged_group`` returns the ranks that share sequences.

    Args:
        world: The ranks of the run. All of them must call this.
        layout: Layout of the run.
        cpu_offload: Value of ``strategy.fsdp.cpu_offload``.
    """
    # An axis that shards parameters or states keeps its mesh dim even with only one rank.
    keep = layout.mesh_axes(layout.division().shard_axes)
    # In evaluation, pipeline stages send shapes from host memory. A registered data-parallel
    # variant may average optimizer states on the host.
    with_host = ["pp"]
    if layout.facts.shards_parameters and cpu_offload != "none":
        with_host += ["dp_shard", "tp"]
    if DATA_PARALLEL.entry(layout.data_parallel).target is not None:
        with_host += ["dp_replicate"]
    # A layer waits for the collectives of the tensor axis. Without priority, gathers and reductions
    # of data ranks, which are needed only by later layers, would occupy the multiprocessors first.
    return world.lay_out(layout.mesh_sizes(), keep=keep, urgent=("tp",), with_host=tuple(with_host))


def merged_group(world: World, layout: Layout, axis: str) -> ProcessGroup:
    """Return this rank's group along an axis that the run's mesh merges into a data axis."""
    stride = layout.stride(axis)
    first = world.rank - layout.coordinates(world.rank)[axis] * stride
    ranks = [first + stride * index for index in range(layout.axes[axis])]
    backend = "nccl" if world.backend is Backend.NCCL else None
    return disjoint_group(ranks, name=axis, timeout_s=world.timeout_s, backend=backend)


def expert_mesh(world: World, layout: Layout, *, cpu_offload: str) -> Mesh:
    """Return the mesh of parameters of experts, with axes pp, dp_replicate, efsdp, ep.

    It has the same ranks as ``run_mesh``, in the same order.

    Args:
        world: The ranks of the run. All of them must call this.
        layout: Layout of the run, with an expert degree above 1.
        cpu_offload: Value of ``strategy.fsdp.cpu_offload``.
    """
    with_host = (EXPERT_SHARD, EXPERT) if cpu_offload != "none" else ()
    return world.lay_out(
        layout.expert_axes, keep=(EXPERT_SHARD,), urgent=(EXPERT,), with_host=with_host
    )


def sharding_mesh(mesh: Mesh, layout: Layout, *, is_expert: bool = False) -> DeviceMesh:
    """Return the submesh over which ``fully_shard`` shards parameters, replicas first.

    Args:
        mesh: ``run_mesh``, or ``expert_mesh`` for parameters of experts.
        layout: Layout of the run.
        is_expert: Whether the parameters belong to experts.
    """
    division = layout.division(is_expert=is_expert)
    replicas = [name for name in layout.mesh_axes(division.replicate_axes) if mesh.size(name) > 1]
    return mesh.device_mesh[(*replicas, *layout.mesh_axes(division.shard_axes))]


def data_mesh(
    group: ProcessGroup, *, replicate: int, shard: int, timeout_s: float | None = None
) -> DeviceMesh:
    """Return the mesh of ``replicate`` copies of ``shard`` ranks each, shards innermost.

    With one copy the mesh has only the axis ``dp_shard``.

    Args:
        group: The ranks that share a model.
        replicate: Number of copies.
        shard: Number of ranks per copy.
        timeout_s: Timeout of collectives in seconds; None for torch's default.

    Raises:
        ValueError: The product is not the size of the group, or copies are requested in only a part
            of the world, which is not possible because all ranks of the world must create the
            groups.
    """
    if replicate * shard != group.size:
        raise ValueError(f"{replicate} x {shard} ranks do not match the group's {group.size}")
    kind, is_world = device_of(group).type, group.size == dist.get_world_size()
    if replicate == 1 and is_world:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("dp_shard",))
    if replicate == 1:
        return DeviceMesh.from_group(group.torch_group, kind, mesh_dim_names=("dp_shard",))
    if not is_world:
        raise ValueError(
            f"{replicate} replicas over ranks {list(group.ranks)}, a part of the world: pass "
            "mesh=world.mesh(...).device_mesh[...] instead of the group"
        )
    sizes = {"dp_replicate": replicate, "dp_shard": shard}
    rank, keep = dist.get_rank(), tuple(sizes)
    return Mesh(sizes, rank=rank, device_type=kind, keep=keep, timeout_s=timeout_s).device_mesh
