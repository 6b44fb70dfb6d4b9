"""Sharded data parallelism: each rank holds its share of parameters, gradients and states.

It composes torch's ``fully_shard``; it updates nothing.

Source: Rajbhandari et al., "ZeRO", 2020 (stages 2 and 3); Zhao et al., "PyTorch FSDP", 2023.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from axonlaunch.comm import World
from axonlaunch.engines.fsdp_memory import FSDPMemoryStats, MemoryWatch
from axonlaunch.engines.mesh import data_mesh
from axonlaunch.engines.update import clip_gradients


class ShardingStrategy(StrEnum):
    """What is divided among ranks."""

    FULL_SHARD = "full_shard"
    """parameters, gradients, optimizer states (ZeRO-3)"""
    SHARD_GRAD_OP = "shard_grad_op"
    """gradients and optimizer states; parameters stay whole from forward to backward (ZeRO-2)"""
    NO_SHARD = "no_shard"
    """nothing"""
    HYBRID_SHARD = "hybrid_shard"
    """as full_shard inside a replica; replicas average their gradients"""


class CPUOffload(StrEnum):
    """What lives in host memory between uses."""

    NONE = "none"
    PARAMS = "params"
    """parameters and gradients; the update streams them through the device"""
    OPTIMIZER_STATES = "optimizer_states"
    """the optimizer's states; the update streams them through the device"""
    FULL = "full"
    """parameters, gradients and states; the update runs on the host"""

    @property
    def keeps_parameters_on_host(self) -> bool:
        """Whether shards live on the host."""
        return self in (CPUOffload.PARAMS, CPUOffload.FULL)


class FSDP(nn.Module):
    """A module whose parameters are sharded over a mesh; they are DTensors afterwards.

    The module's own parameters keep their names: take them, and its state, from ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        world: World,
        mesh: DeviceMesh | None = None,
        layers: Sequence[nn.Module] = (),
        sharding: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        replicate: int = 1,
        mixed_precision: MixedPrecisionPolicy | None = None,
        keep_gathered: bool = False,
    ) -> None:
        """Shard a module in place.

        Args:
            module: On its device or on ``meta`` (then fill the shards after this).
            world: Who takes part.
            mesh: Who shares it: one axis, or replicas x shards; None: the whole world, laid out
                by ``sharding`` and ``replicate``. Parameters that are DTensors already must be on
                another slice of the same mesh.
            layers: Blocks that are gathered one at a time; what is left is gathered as one more.
            sharding: What is divided.
            cpu_offload: What lives in host memory between uses.
            replicate: Copies of the parameters under hybrid_shard; divides the world.
            mixed_precision: torch's policy: in which type to gather, compute and reduce.
            keep_gathered: Keep what is gathered after a forward, whatever ``sharding`` says: for
                who gathers and reshards by himself, as pipeline schedules do.

        Raises:
            ValueError: The world can't be divided so.
        """
        super().__init__()
        self.sharding = ShardingStrategy(sharding)
        self.cpu_offload = CPUOffload(cpu_offload)
        self.mesh = mesh or _mesh(world, self.sharding, replicate)
        self.module = module
        total = sum(p.numel() * p.element_size() for p in module.parameters())
        offload = OffloadPolicy()
        if self.cpu_offload.keeps_parameters_on_host:
            offload = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
        reshard = self.sharding in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        reshard = reshard and not keep_gathered
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": mixed_precision or MixedPrecisionPolicy(),
            "offload_policy": offload,
        }
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        # The root's own parameters are needed again at once, at the start of backward.
        fully_shard(module, reshard_after_forward=False, **options)
        self._memory = MemoryWatch(module, total_bytes=total, device=world.device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its blocks gather their parameters and let them go again."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside add to whole gradients without reducing them."""
        root = self._root()
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def gather_parameters(self) -> None:
        """Make every parameter whole on every rank, until ``reshard_parameters``."""
        for module in self._sharded():
            module.unshard()

    def reshard_parameters(self) -> None:
        """Free what is not this rank's share of the parameters."""
        for module in self._sharded():
            module.reshard()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm``; return the norm before, 0-dim."""
        return clip_gradients(self.module.parameters(), max_norm=max_norm)

    def ignore_returned_view(self) -> None:
        """Let torch not warn that the module returns a view: whoever is given it changes none."""
        name = type(self.module).__name__
        blocks = {type(one).__name__ for one in self._sharded()[1:]}
        if name not in blocks:  # by which a warning of theirs can't be told from one of it
            returned = rf"FSDP2-wrapped module \({name}\) returned a view"
            warnings.filterwarnings("ignore", message=returned)

    def memory_stats(self) -> FSDPMemoryStats:
        """Return what parameters hold on this rank now and at most, and what they would whole."""
        return self._memory.stats()

    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


def _mesh(world: World, sharding: ShardingStrategy, replicate: int) -> DeviceMesh:
    if sharding is ShardingStrategy.NO_SHARD:
        return init_device_mesh(
            world.device.type,
            (world.world_size, 1),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
    if sharding is not ShardingStrategy.HYBRID_SHARD and replicate != 1:
        raise ValueError(f"replicate={replicate}: only hybrid_shard has replicas, not {sharding}")
    if world.world_size % replicate:
        raise ValueError(f"replicate={replicate} does not divide {world.world_size} ranks")
    return data_mesh(world, replicate=replicate, shard=world.world_size // replicate)
