"""Sharded data parallelism: each rank holds a shard of parameters, gradients and states.

Based on torch's ``fully_shard``. Updates are done elsewhere.

Source: Rajbhandari et al., "ZeRO", 2020 (stages 2 and 3); Zhao et al., "PyTorch FSDP", 2023.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
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
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axonlaunch.comm import ProcessGroup, World
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.comm.process_group import default_group
from axonlaunch.config.optimization.optimizer import OPTIMIZERS, OptimizerConfig
from axonlaunch.config.precision import MIXED_PRECISION
from axonlaunch.engines.data_parallel.device_mesh import data_mesh
from axonlaunch.engines.data_parallel.fsdp_memory import (
    FSDPMemoryEstimate,
    FSDPMemoryStats,
    MemoryWatch,
    estimate_fsdp_memory,
)
from axonlaunch.engines.data_parallel.torch_internals import reduce_gradients_to
from axonlaunch.engines.expert.experts import sharded_dim
from axonlaunch.engines.optimizer.clipping import clip_gradients
from axonlaunch.engines.optimizer.offload import HOST
from axonlaunch.engines.optimizer.streaming import STREAMED, stream_parameters
from axonlaunch.engines.precision.policy import sharded_policy

LARGE_UNIT = 16 * 2**20
"""Minimum bytes of parameters outside of blocks that are gathered as a separate unit. Smaller ones
are gathered with the root, to save the fixed cost of a message.
"""


class ShardingStrategy(StrEnum):
    """Tensors that are divided among ranks."""

    FULL_SHARD = "full_shard"
    """parameters, gradients, optimizer states (ZeRO-3)"""
    SHARD_GRAD_OP = "shard_grad_op"
    """gradients and optimizer states; parameters stay gathered from forward to backward (ZeRO-2)"""
    NO_SHARD = "no_shard"
    """nothing"""
    HYBRID_SHARD = "hybrid_shard"
    """full_shard within a replica; gradients are averaged over replicas"""


class CPUOffload(StrEnum):
    """Tensors that are kept in host memory between uses."""

    NONE = "none"
    PARAMS = "params"
    """parameters and gradients; the update streams them through the device"""
    OPTIMIZER_STATES = "optimizer_states"
    """the optimizer's states; the update streams them through the device"""
    FULL = "full"
    """parameters, gradients and states; the update runs on the host"""

    @property
    def keeps_parameters_on_host(self) -> bool:
        """Whether the shards are in host memory."""
        return self in (CPUOffload.PARAMS, CPUOffload.FULL)

    @property
    def streams_the_update(self) -> bool:
        """Whether an update moves one parameter after another to the device."""
        return self in (CPUOffload.PARAMS, CPUOffload.OPTIMIZER_STATES)


@dataclass(frozen=True, kw_only=True)
class ShardedExperts:
    """Modules with experts sharded over the expert axis before they are sharded.

    Attributes:
        modules: Modules whose parameters are experts.
        mesh: Mesh over which they are sharded: replicas x shards, or shards.
        gradient_ranks: Number of ranks with different samples, by which gradients are divided.
    """

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    gradient_ranks: int


def sharded_units(module: nn.Module) -> list[FSDPModule]:
    """Return the units of a sharded module; the parameters of each are gathered together."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


class FSDP(nn.Module):
    """A module with parameters sharded over a mesh, as DTensors.

    Parameter names are those of the original module: use ``module`` for parameters and state.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        world: World | None = None,
        mesh: DeviceMesh | None = None,
        layers: Sequence[nn.Module] = (),
        before_blocks: Sequence[nn.Module] = (),
        after_blocks: Sequence[nn.Module] = (),
        sharding: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        replicate: int = 1,
        mixed_precision: MixedPrecisionPolicy | bool | None = None,
        keep_gathered: bool = False,
        experts: ShardedExperts | None = None,
    ) -> None:
        """Shard a module in place.

        Args:
            module: The module, on its device or on ``meta``. In the latter case, initialize the
                shards afterwards.
            group: The ranks that share the module; None for the whole world.
            world: The ranks as a ``World``; mutually exclusive with ``group``.
            mesh: Mesh of the ranks: one axis, or replicas x shards. None derives it from the group,
                ``sharding`` and ``replicate``. DTensor parameters must be on another slice of the
                same mesh.
            layers: Blocks, gathered one at a time. All other parameters, and blocks that share a
                parameter, form one more unit.
            before_blocks: Modules that forward calls before the blocks. If they hold at least
                ``LARGE_UNIT`` bytes and share no parameter, they form one unit, which is freed like
                a block.
            after_blocks: Modules that forward calls after the blocks, treated like
                ``before_blocks``, but kept gathered until backward, which starts with them.
            sharding: States that are divided among ranks: parameters, gradients or neither.
            cpu_offload: States that are kept in host memory. With ``params`` and
                ``optimizer_states`` the update streams through the device: use the optimizer
                returned by ``optimizer``; the step of any other is an error.
            replicate: Number of copies of the parameters with hybrid_shard; must divide the world
                size.
            mixed_precision: torch's policy with the types for gathering, computing and reducing.
                True gathers and computes in bf16 and reduces in fp32.
            keep_gathered: Keep parameters gathered after a forward, independent of ``sharding``.
                For callers that gather and reshard explicitly, as pipeline schedules do.
            experts: Modules inside of ``layers`` whose experts are sharded over the expert axis;
                they are sharded and gathered separately.

        Raises:
            ValueError: The group cannot be divided in this way.
        """
        super().__init__()
        self.sharding = ShardingStrategy(sharding)
        self.cpu_offload = CPUOffload(cpu_offload)
        if world is not None and group is not None:
            raise ValueError("group and world both define the ranks of the module; pass only one")
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
        if experts is not None:
            _shard_experts(experts, **options, reshard_after_forward=reshard)
        _shard_units(module, layers, before_blocks, after_blocks, reshard=reshard, **options)
        self._memory = MemoryWatch(module, total_bytes=total, device=self._device)
        if self.cpu_offload.streams_the_update:
            self._refuse_other_optimizers()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; each block gathers its parameters and frees them afterwards."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full gradients without reducing them in backward passes inside the context."""
        root = self._root()
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def gather_parameters(self) -> None:
        """Gather every parameter on every rank until ``reshard_parameters``."""
        for module in self.units():
            module.unshard()

    def reshard_parameters(self) -> None:
        """Free all parameters except this rank's shards."""
        for module in self.units():
            module.reshard()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm``; return the original norm, 0-dim."""
        return clip_gradients(self.module.parameters(), max_norm=max_norm)

    def optimizer(self, make: Callable[..., Optimizer], **options: Any) -> Optimizer:
        """Create an optimizer of the shards, with states and update as ``cpu_offload`` requires.

        Without offloading, and with ``full``, any optimizer of ``parameters()`` is equivalent.

        Args:
            make: An optimizer class such as ``torch.optim.AdamW``, or a function of parameters and
                options. The update of a parameter may use only its own gradient and states.
            options: Keyword arguments of ``make`` other than the parameters, such as ``lr=1e-3``.
        """
        optimizer = make(self.module.parameters(), **options)
        if self.cpu_offload.streams_the_update:
            states_on_host = self.cpu_offload is CPUOffload.OPTIMIZER_STATES
            stream_parameters(
                optimizer, device=self._device, states_on=HOST if states_on_host else self._device
            )
        return optimizer

    def accumulate_in(self, dtype: torch.dtype) -> None:
        """Add up the gradients of micro-batches in a dtype, see ``train.grad_dtype``.

        Call this after the shards were initialized.
        """
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = dtype
        for unit in self.units():
            reduce_gradients_to(unit, dtype)

    def memory_estimate(self, optimizer: OptimizerConfig | str = "adamw") -> FSDPMemoryEstimate:
        """Return the bytes that this rank holds between steps, independent of the device.

        Args:
            optimizer: Optimizer whose states are counted: a name such as ``adamw`` or ``sgd`` (with
                momentum), or an optimizer configuration.

        Raises:
            ValueError: There is no optimizer of that name.
        """
        if isinstance(optimizer, str):
            if optimizer not in OPTIMIZERS:
                names = ", ".join(OPTIMIZERS.names())
                raise ValueError(f"optimizer={optimizer}: no such optimizer; use {names}")
            return estimate_fsdp_memory(self.module, OPTIMIZERS.config(optimizer)())
        return estimate_fsdp_memory(self.module, optimizer)

    def ignore_returned_view(self) -> None:
        """Suppress torch's warning about a returned view. Callers do not modify the output."""
        name = type(self.module).__name__
        blocks = {type(unit).__name__ for unit in self.units()[1:]}
        if name not in blocks:  # otherwise the blocks' warnings would be suppressed too
            returned = rf"FSDP2-wrapped module \({name}\) returned a view"
            warnings.filterwarnings("ignore", message=returned)

    def memory_stats(self) -> FSDPMemoryStats:
        """Return the parameters' current, peak and unsharded bytes on this rank."""
        return self._memory.stats()

    def _refuse_other_optimizers(self) -> None:
        """Make steps of other optimizers an error, because their states ignore ``cpu_offload``.

        torch calls this hook in every optimizer's step, until this module is deleted.
        """
        module, offload = weakref.ref(self.module), self.cpu_offload

        def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            sharded = module()
            if sharded is None or optimizer in STREAMED:
                return
            sharded_parameters = set(sharded.parameters())
            if any(
                p in sharded_parameters for group in optimizer.param_groups for p in group["params"]
            ):
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

    def units(self) -> list[FSDPModule]:
        """Return the root and its blocks; the parameters of each are gathered together."""
        return sharded_units(self.module)


def _shard_units(
    module: nn.Module,
    layers: Sequence[nn.Module],
    before_blocks: Sequence[nn.Module],
    after_blocks: Sequence[nn.Module],
    *,
    reshard: bool,
    **options: Any,
) -> None:
    """Shard a module unit by unit: the ends of its forward, its blocks, and everything else.

    Args:
        module: Module that is sharded in place.
        layers: Blocks of the module.
        before_blocks: Modules that forward calls before the blocks.
        after_blocks: Modules that forward calls after the blocks.
        reshard: Whether a unit is freed after its forward. The last units of a forward are kept,
            because backward starts with them.
        options: Other arguments of ``fully_shard``.
    """
    if first := _large_unit(before_blocks, module):
        fully_shard(first, reshard_after_forward=reshard, **options)
    if last := _large_unit(after_blocks, module):
        fully_shard(last, reshard_after_forward=False, **options)
    for layer in _unshared_layers(layers):
        fully_shard(layer, reshard_after_forward=reshard, **options)
    fully_shard(module, reshard_after_forward=False, **options)


def _policy(precision: MixedPrecisionPolicy | bool | None) -> MixedPrecisionPolicy:
    if precision is True:
        return sharded_policy(MIXED_PRECISION)
    return precision or MixedPrecisionPolicy()


def _shard_experts(
    experts: ShardedExperts, *, mp_policy: MixedPrecisionPolicy, **options: Any
) -> None:
    """Shard experts over fewer ranks than other parameters, with gradients on the same scale.

    The loss of a rank is the mean of its samples, so gradients are divided by the number of ranks
    with samples. Experts have received the gradients of all ranks that share them already.
    """
    # The block has cast the inputs. Weights of a router stay in their type.
    options["mp_policy"] = dataclasses.replace(mp_policy, cast_forward_inputs=False)
    shards = experts.mesh.size(experts.mesh.ndim - 1)
    options["mesh"] = experts.mesh
    for module in experts.modules:
        fully_shard(module, shard_placement_fn=partial(_expert_placement, shards=shards), **options)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(experts.gradient_ranks)
        if shards > 1:  # torch divides twice on a mesh of one rank
            module.set_force_sum_reduction_for_comms(True)


def _expert_placement(parameter: nn.Parameter, *, shards: int) -> Shard:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(sharded_dim(local.shape, shards=shards))


def _unshared_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that share no parameter with other layers."""
    users = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    return [layer for layer in layers if all(users[id(p)] == 1 for p in layer.parameters())]


def _large_unit(modules: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters, if large and not sharing parameters with other units."""
    with_parameters = [module for module in modules if any(True for _ in module.parameters())]
    submodules = {part for module in with_parameters for part in module.modules()}
    parameters = {parameter for module in with_parameters for parameter in module.parameters()}
    others = (
        part
        for module in model.modules()
        if module not in submodules
        for part in _direct_parameters(module)
    )
    if not parameters.isdisjoint(others):
        return []
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return with_parameters if total >= LARGE_UNIT else []


def _direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def _mesh(
    group: ProcessGroup, sharding: ShardingStrategy, replicate: int, timeout_s: float | None
) -> DeviceMesh:
    """Return a group's mesh: replicas x shards with shards innermost, or one axis of shards."""
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
