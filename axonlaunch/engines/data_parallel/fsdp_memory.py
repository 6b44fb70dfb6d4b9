"""Memory of a sharded module's parameters on this rank, measured from their storages.

``fully_shard``'s records are private. They are accessed only here, and a test checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from axonlaunch.config.optimization.optimizer import OptimizerConfig
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.optimization.parameter_groups import states_of, with_options
from axonlaunch.config.precision import master_format, state_format
from axonlaunch.engines.data_parallel.torch_internals import fsdp_parameters, whole_parameter
from axonlaunch.engines.optimizer.optimizers import new_state
from axonlaunch.models.torch_dtypes import torch_dtype
from axonlaunch.models.torch_internals import local_tensor, storage_key


@dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes of parameters on one rank.

    Attributes:
        current_bytes: Bytes held now: this rank's shards and gathered full parameters.
        peak_bytes: Maximum bytes held, sampled after each block gathers its parameters in its first
            two forwards; later forwards behave the same.
        total_bytes: Bytes of the full parameters without sharding.
        savings: Fraction of ``total_bytes`` not held now; negative while shards and full parameters
            are both held.
        device_peak_bytes: Peak of all memory of the device's allocator; None on CPU, which has no
            such record.
    """

    current_bytes: int
    peak_bytes: int
    total_bytes: int
    savings: float
    device_peak_bytes: int | None

    @classmethod
    def combine(cls, stats: Sequence[FSDPMemoryStats]) -> Self:
        """Return the combined memory of several sharded modules, adding their peaks."""
        return cls.of(
            sum(module_stats.current_bytes for module_stats in stats),
            sum(module_stats.peak_bytes for module_stats in stats),
            sum(module_stats.total_bytes for module_stats in stats),
            stats[0].device_peak_bytes if stats else None,
        )

    @classmethod
    def of(cls, current: int, peak: int, total: int, device_peak: int | None) -> Self:
        """Create stats, computing ``savings`` from the other figures."""
        savings = 1 - current / total if total else 0.0
        return cls(current, peak, total, savings, device_peak)


@dataclass(frozen=True)
class FSDPMemoryEstimate:
    """Bytes that one rank holds between steps, independent of the device.

    Attributes:
        parameter_bytes: Bytes of this rank's parameter shards.
        gradient_bytes: Bytes of the gradients of the trained shards.
        optimizer_bytes: Bytes of the optimizer states and the masters of the trained shards.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def estimate_fsdp_memory(module: nn.Module, optimizer: OptimizerConfig) -> FSDPMemoryEstimate:
    """Count the bytes of a sharded module's parameters, gradients and optimizer states."""
    sharded = [local_tensor(p) for p in module.parameters()]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    state_number_format = state_format(optimizer)
    dtype = None if state_number_format is None else torch_dtype(state_number_format)
    masters = master_format(optimizer)
    in_16_bits = [p for p in trained.values() if p.dtype != torch.float32]
    return FSDPMemoryEstimate(
        parameter_bytes=sum(part.nbytes for part in sharded),
        gradient_bytes=sum(
            local_tensor(p).numel() * (p.grad_dtype or p.dtype).itemsize for p in trained.values()
        ),
        optimizer_bytes=sum(
            0 if masters is None else masters.nbytes * local_tensor(p).numel() for p in in_16_bits
        )
        + sum(
            new_state(state, p.to("meta"), device=torch.device("meta"), dtype=dtype).nbytes
            for name, p in trained.items()
            for state in states_of(
                with_options(optimizer, ParameterFacts(name=name, shape=tuple(p.shape))),
                tuple(p.shape),
            ).values()
        ),
    )


class MemoryWatch:
    """Measures the storages of a sharded module's parameters, now and during forwards."""

    def __init__(self, module: nn.Module, *, total_bytes: int, device: torch.device) -> None:
        self._module = module
        self._total = total_bytes
        self._device = device
        self._peak = 0
        self._watched: dict[nn.Module, RemovableHandle] = {}
        self._sampled: set[nn.Module] = set()
        for child in module.modules():
            if isinstance(child, FSDPModule):
                # Runs after fully_shard's hook, when the block's parameters are gathered.
                self._watched[child] = child.register_forward_pre_hook(self._sample)

    def stats(self) -> FSDPMemoryStats:
        """Return current and peak bytes."""
        current = self._measure()
        self._peak = max(self._peak, current)
        device_peak = None
        if self._device.type != "cpu":
            device_peak = torch.accelerator.max_memory_allocated(self._device)
        return FSDPMemoryStats.of(current, self._peak, self._total, device_peak)

    def _sample(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        self._peak = max(self._peak, self._measure())
        # Each sample reads every parameter, so sampling every forward would slow down deep models.
        if module in self._sampled:
            self._watched.pop(module).remove()
        self._sampled.add(module)

    def _measure(self) -> int:
        """Return the bytes of all distinct live storages."""
        storage_bytes: dict[int, int] = {}
        for tensor in _parameter_storages(self._module):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storage_bytes[storage_key(tensor)] = storage.nbytes()
        return sum(storage_bytes.values())


def _parameter_storages(module: nn.Module) -> Iterator[Tensor]:
    """Yield the local shards and gathered parameters of every ``fully_shard`` unit."""
    for child in module.modules():
        if not isinstance(child, FSDPModule):
            continue
        for parameter in fsdp_parameters(child):
            yield local_tensor(parameter.sharded_param)
            yield from parameter.all_gather_outputs
            if (full_parameter := whole_parameter(parameter)) is not None:
                yield local_tensor(full_parameter)
