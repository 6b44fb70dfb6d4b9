"""Sharded data parallelism: each rank holds its share of parameters, gradients and states.

It composes torch's ``fully_shard``; it updates nothing.

Source: Rajbhandari et al., "ZeRO", 2020 (stages 2 and 3); Zhao et al., "PyTorch FSDP", 2023.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.argument_checks import device_of
from axonlaunch.comm.process_group import default_group
from axonlaunch.config.optimizer import OPTIMIZERS, OptimizerConfig
from axonlaunch.engines.data_parallel.fsdp_memory import (
    FSDPMemoryEstimate,
    FSDPMemoryStats,
    MemoryWatch,
    estimate_fsdp_memory,
)
from axonlaunch.engines.device_mesh import data_mesh
from axonlaunch.engines.optimizer.clipping import clip_gradients
from axonlaunch.engines.optimizer.offload import HOST
from axonlaunch.engines.optimizer.streaming import STREAMED, stream_parameters
from axonlaunch.engines.precision.policy import sharded_policy

LARGE_UNIT = 16 * 2**20
"""Bytes of parameters beside the blocks that are gathered by themselves; less travels with what is
left, for a message costs more than what is in it."""


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

    @property
    def streams_the_update(self) -> bool:
        """Whether an update brings one parameter after another to the device."""
        return self in (CPUOffload.PARAMS, CPUOffload.OPTIMIZER_STATES)


class FSDP(nn.Module):
    """A module whose parameters are sharded over a mesh; they are DTensors afterwards.

    The module's own parameters keep their names: take them, and its state, from ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        world: World | None = None,
        mesh: DeviceMesh | None = None,
        layers: Sequence[nn.Module] = (),
        before: Sequence[nn.Module] = (),
        after: Sequence[nn.Module] = (),
        sharding: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        replicate: int = 1,
        mixed_precision: MixedPrecisionPolicy | bool | None = None,
        keep_gathered: bool = False,
    ) -> None:
        """Shard a module in place.

        Args:
            module: On its device or on ``meta`` (then fill the shards after this).
            group: The ranks that share it; None: the whole world.
            world: The same as a world; not with ``group``.
            mesh: The same, laid out: one axis, or replicas x shards; None: the group, laid out by
                ``sharding`` and ``replicate``. Parameters that are DTensors already must be on
                another slice of the same mesh.
            layers: Blocks that are gathered one at a time; what is left is gathered as one more,
                with the blocks that share a parameter.
            before: Modules that forward calls before the blocks. Those of ``LARGE_UNIT`` bytes that
                share no parameter are gathered together, and let go as blocks are.
            after: Modules that it calls after them, as ``before``, but kept until backward, which
                begins with them.
            sharding: What is divided.
            cpu_offload: What lives in host memory between uses. Under ``params`` and
                ``optimizer_states`` the update streams through the device: take the optimizer
                from ``optimizer``, for another one's step is refused.
            replicate: Copies of the parameters under hybrid_shard; divides the world.
            mixed_precision: torch's policy: in which type to gather, compute and reduce. True:
                gather and compute in bf16, reduce in fp32.
            keep_gathered: Keep what is gathered after a forward, whatever ``sharding`` says: for
                who gathers and reshards by himself, as pipeline schedules do.

        Raises:
            ValueError: The group can't be divided so.
        """
        super().__init__()
        self.sharding = ShardingStrategy(sharding)
        self.cpu_offload = CPUOffload(cpu_offload)
        if world is not None and group is not None:
            raise ValueError("group and world both say who shares the module; give one of them")
        group = group or (world.default_group if world else default_group())
        timeout_s = world.timeout_s if world else None
        self.mesh = mesh or _mesh(group, self.sharding, replicate, timeout_s)
        self.module = module
        self._device = world.device if world else device_of(group)
        total = sum(p.numel() * p.element_size() for p in module.parameters())
        offload = OffloadPolicy()
        if self.cpu_offload.keeps_parameters_on_host:
            offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")
        reshard = self.sharding in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        reshard = reshard and not keep_gathered
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": _policy(mixed_precision),
            "offload_policy": offload,
        }
        if first := _large_unit(before, module):
            fully_shard(first, reshard_after_forward=reshard, **options)
        if last := _large_unit(after, module):
            fully_shard(last, reshard_after_forward=False, **options)
        for layer in _unshared_layers(layers):
            fully_shard(layer, reshard_after_forward=reshard, **options)
        # The root's own parameters are needed again at once, at the start of backward.
        fully_shard(module, reshard_after_forward=False, **options)
        self._memory = MemoryWatch(module, total_bytes=total, device=self._device)
        if self.cpu_offload.streams_the_update:
            self._refuse_other_optimizers()

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
        for module in self._sharded_units():
            module.unshard()

    def reshard_parameters(self) -> None:
        """Free all parameters but this rank's shards."""
        for module in self._sharded_units():
            module.reshard()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm``; return the norm before, 0-dim."""
        return clip_gradients(self.module.parameters(), max_norm=max_norm)

    def optimizer(self, make: Callable[..., Optimizer], **options: Any) -> Optimizer:
        """Build an optimizer of the shards, whose states and update are where offloading says.

        Without offloading, and under ``full``, any optimizer of ``parameters()`` does the same.

        Args:
            make: A class as ``torch.optim.AdamW``, or what else takes parameters and options. It
                updates each parameter from its own gradient and states alone.
            options: What ``make`` takes beside the parameters, ``lr=1e-3``.
        """
        made = make(self.module.parameters(), **options)
        if self.cpu_offload.streams_the_update:
            states_on_host = self.cpu_offload is CPUOffload.OPTIMIZER_STATES
            stream_parameters(
                made, device=self._device, states_on=HOST if states_on_host else self._device
            )
        return made

    def memory_estimate(self, optimizer: OptimizerConfig | str = "adamw") -> FSDPMemoryEstimate:
        """Return what this rank holds between steps, on whatever device.

        Args:
            optimizer: Whose states to count: ``adamw``, ``sgd`` (with momentum), or figures.

        Raises:
            ValueError: There is no such optimizer.
        """
        if isinstance(optimizer, str):
            if optimizer not in OPTIMIZERS:
                known = ", ".join(OPTIMIZERS.names())
                raise ValueError(f"optimizer={optimizer}: its states are not known; use {known}")
            return estimate_fsdp_memory(self.module, OPTIMIZERS.config(optimizer)())
        return estimate_fsdp_memory(self.module, optimizer)

    def ignore_returned_view(self) -> None:
        """Let torch not warn that the module returns a view: whoever is given it changes none."""
        name = type(self.module).__name__
        blocks = {type(unit).__name__ for unit in self._sharded_units()[1:]}
        if name not in blocks:  # by which a warning of theirs can't be distinguished from one of it
            returned = rf"FSDP2-wrapped module \({name}\) returned a view"
            warnings.filterwarnings("ignore", message=returned)

    def memory_stats(self) -> FSDPMemoryStats:
        """Return what parameters hold on this rank now and at most, and what they would whole."""
        return self._memory.stats()

    def _refuse_other_optimizers(self) -> None:
        """Refuse other optimizers, whose states would not be where ``cpu_offload`` says.

        torch calls every optimizer's step through this hook, until this module is gone.
        """
        module, offload = weakref.ref(self.module), self.cpu_offload

        def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            sharded = module()
            if sharded is None or optimizer in STREAMED:
                return
            mine = set(sharded.parameters())
            if any(p in mine for group in optimizer.param_groups for p in group["params"]):
                kind = type(optimizer).__name__
                raise RuntimeError(
                    f"cpu_offload={offload}: this {kind} keeps its states where the parameters "
                    f"are; build it with model.optimizer(torch.optim.{kind}, ...), or use "
                    "cpu_offload=full, whose update runs on the host"
                )

        weakref.finalize(self, register_optimizer_step_pre_hook(refuse).remove)

    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _sharded_units(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


def _policy(precision: MixedPrecisionPolicy | bool | None) -> MixedPrecisionPolicy:
    if isinstance(precision, bool):
        return sharded_policy("bf16" if precision else "fp32", reduce_dtype=torch.float32)
    return precision or MixedPrecisionPolicy()


def _unshared_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that share no parameter with others."""
    users = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    return [layer for layer in layers if all(users[id(p)] == 1 for p in layer.parameters())]


def _large_unit(modules: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters, if those are many and unshared with other units."""
    holding = [module for module in modules if any(True for _ in module.parameters())]
    inside = {part for module in holding for part in module.modules()}
    mine = {parameter for module in holding for parameter in module.parameters()}
    others = (part for module in model.modules() if module not in inside for part in _own(module))
    if not mine.isdisjoint(others):
        return []
    total = sum(parameter.numel() * parameter.element_size() for parameter in mine)
    return holding if total >= LARGE_UNIT else []


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def _mesh(
    group: ProcessGroup, sharding: ShardingStrategy, replicate: int, timeout_s: float | None
) -> DeviceMesh:
    """Lay a group out: replicas x shards, shards innermost, or one axis of shards."""
    hybrid = sharding is ShardingStrategy.HYBRID_SHARD
    if not hybrid and replicate != 1:
        raise ValueError(f"replicate={replicate}: only hybrid_shard has replicas, not {sharding}")
    if replicate < 1 or group.size % replicate:
        raise ValueError(f"replicate={replicate} does not divide {group.size} ranks")
    replicas = group.size if sharding is ShardingStrategy.NO_SHARD else replicate
    shard = group.size // replicas
    return data_mesh(group, replicate=replicas, shard=shard, timeout_s=timeout_s)


FullyShardedDataParallel = FSDP
"""Another name for ``FSDP``."""
