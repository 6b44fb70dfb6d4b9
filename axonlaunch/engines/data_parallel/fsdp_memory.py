"""Bytes that a sharded module's parameters hold on this rank, read from their storages.

``fully_shard``'s own records are private; they are read here alone, and a test pins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from axonlaunch.config.optimizer import OptimizerConfig
from axonlaunch.config.optimizer_states import ParameterFacts
from axonlaunch.config.parameter_groups import states_of, with_options
from axonlaunch.engines.data_parallel.torch_internals import fsdp_parameters, whole_parameter
from axonlaunch.engines.optimizer.optimizers import new_state
from axonlaunch.models.torch_internals import local_tensor, storage_key


@dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes of parameters on one rank.

    Attributes:
        current_bytes: Held now: this rank's shards, and whole parameters that are gathered.
        peak_bytes: Held at most, sampled when a block has gathered its parameters in one of its
            first two forwards; those after them are like these.
        total_bytes: What the whole parameters take without sharding.
        savings: Share of ``total_bytes`` that is not held now; negative while both shard and
            whole are.
        device_peak_bytes: Everything the device's allocator held at most; None on a CPU, which
            keeps no such record.
    """

    current_bytes: int
    peak_bytes: int
    total_bytes: int
    savings: float
    device_peak_bytes: int | None

    @classmethod
    def together(cls, stats: Sequence[FSDPMemoryStats]) -> Self:
        """Return what a rank holds of several sharded modules; their peaks are taken as one."""
        return cls.of(
            sum(part.current_bytes for part in stats),
            sum(part.peak_bytes for part in stats),
            sum(part.total_bytes for part in stats),
            stats[0].device_peak_bytes if stats else None,
        )

    @classmethod
    def of(cls, current: int, peak: int, total: int, device_peak: int | None) -> Self:
        """Add what follows from the rest."""
        savings = 1 - current / total if total else 0.0
        return cls(current, peak, total, savings, device_peak)


@dataclass(frozen=True)
class FSDPMemoryEstimate:
    """Bytes that one rank holds between steps, on whatever device.

    Attributes:
        parameter_bytes: This rank's shards.
        gradient_bytes: Those of the shards that are trained.
        optimizer_bytes: The optimizer's states of them.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def estimate_fsdp_memory(module: nn.Module, optimizer: OptimizerConfig) -> FSDPMemoryEstimate:
    """Count what a sharded module's parameters take with gradients and an optimizer's states."""
    sharded = [local_tensor(p) for p in module.parameters()]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    dtype = torch.float32 if getattr(optimizer, "state_dtype", None) == "fp32" else None
    return FSDPMemoryEstimate(
        parameter_bytes=sum(part.nbytes for part in sharded),
        gradient_bytes=sum(local_tensor(p).nbytes for p in trained.values()),
        optimizer_bytes=sum(
            new_state(state, p.to("meta"), device=torch.device("meta"), dtype=dtype).nbytes
            for name, p in trained.items()
            for state in states_of(
                with_options(optimizer, ParameterFacts(name=name, shape=tuple(p.shape))),
                tuple(p.shape),
            ).values()
        ),
    )


class MemoryWatch:
    """Follows the storages of a sharded module's parameters."""

    def __init__(self, module: nn.Module, *, total_bytes: int, device: torch.device) -> None:
        self._module = module
        self._total = total_bytes
        self._device = device
        self._peak = 0
        self._watched: dict[nn.Module, RemovableHandle] = {}
        self._sampled: set[nn.Module] = set()
        for child in module.modules():
            if isinstance(child, FSDPModule):
                # After fully_shard's own hook, which gathers: the block's parameters are whole.
                self._watched[child] = child.register_forward_pre_hook(self._sample)

    def stats(self) -> FSDPMemoryStats:
        """Measure now."""
        current = self._measure()
        self._peak = max(self._peak, current)
        device_peak = None
        if self._device.type != "cpu":
            device_peak = torch.accelerator.max_memory_allocated(self._device)
        return FSDPMemoryStats.of(current, self._peak, self._total, device_peak)

    def _sample(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        self._peak = max(self._peak, self._measure())
        # Each sample reads every parameter, so that all together would slow a deep model's steps.
        if module in self._sampled:
            self._watched.pop(module).remove()
        self._sampled.add(module)

    def _measure(self) -> int:
        """Sum distinct live storages, in bytes."""
        seen: dict[int, int] = {}
        for tensor in _parameter_storages(self._module):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                seen[storage_key(tensor)] = storage.nbytes()
        return sum(seen.values())


def _parameter_storages(module: nn.Module) -> Iterator[Tensor]:
    """Yield local shards and gathered parameters of every ``fully_shard`` unit."""
    for child in module.modules():
        if not isinstance(child, FSDPModule):
            continue
        for parameter in fsdp_parameters(child):
            yield local_tensor(parameter.sharded_param)
            yield from parameter.all_gather_outputs
            if (whole := whole_parameter(parameter)) is not None:
                yield local_tensor(whole)
