"""Replicated data parallelism: every rank holds the whole model, gradients are averaged.

It averages gradients and copies parameters and buffers; it updates nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.process_group import default_group
from axonlaunch.engines.update import buckets, local_part

MIB = 1024**2

# torch 2.13 renamed the argument, and warns of the old name.
_BUFFERS_KEYWORD = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class GradSyncStrategy(StrEnum):
    """When replicas agree on gradients."""

    OVERLAPPED = "overlapped"
    """buckets are reduced during backward, by torch's DistributedDataParallel"""
    SYNCHRONOUS = "synchronous"
    """buckets are reduced at the end of every backward"""
    NO_SYNC = "no_sync"
    """backward sends nothing; call ``sync_gradients`` before the update"""


class GradientBucket:
    """Parameters of one dtype and device whose gradients are reduced as one flat tensor.

    Of a DTensor it is this rank's part that is reduced: replicas hold the same part.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        self.missing = len(parameters)
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup, *, dtype: torch.dtype | None = None) -> None:
        """Copy the gradients together and begin to sum them over the group.

        A missing gradient counts as zero, so that ranks which used different parts agree.

        Args:
            group: Replicas.
            dtype: Type of the sum; None: the gradients' own.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([local_part(p.grad).reshape(-1) for p in self.parameters])  # type: ignore[arg-type]
        self._flat = flat if dtype is None else flat.to(dtype)
        if dtype is not None and dtype.itemsize < flat.dtype.itemsize:
            self._flat.div_(dist.get_world_size(group))  # before the sum, which could overflow
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def finish(self, world_size: int) -> None:
        """Wait for the sum and give each parameter its mean gradient."""
        assert self._flat is not None
        assert self._work is not None
        self._work.wait()
        gradients = [local_part(p.grad) for p in self.parameters]  # type: ignore[arg-type]
        if self._flat.dtype == gradients[0].dtype:
            self._flat.div_(world_size)
        for mine, mean in zip(
            gradients, self._flat.split([g.numel() for g in gradients]), strict=True
        ):
            mine.copy_(mean.view_as(mine))
        self._flat = self._work = None
        self.missing = len(self.parameters)


class GradientSynchronizer:
    """Averages gradients over a group, bucket by bucket, in reverse order of the parameters."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        group: ProcessGroup | None = None,
        bucket_size_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Fill buckets.

        Args:
            parameters: Those that need a gradient are synchronised.
            group: Replicas; None is the whole world.
            bucket_size_mb: MiB of gradients reduced together.
            reduce_dtype: Type in which gradients are summed; None: their own.
        """
        self.group = group or default_group()
        self.buckets = _fill(parameters, limit=int(bucket_size_mb * MIB))
        self._dtype = reduce_dtype
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._next = 0

    def sync(self) -> None:
        """Replace every gradient by its mean over the group; all its ranks call this."""
        if self.group.size == 1:
            return
        for bucket in self.buckets[self._next :]:
            bucket.start(self.group.torch_group, dtype=self._dtype)
        for bucket in self.buckets:
            bucket.finish(self.group.size)
        self._next = 0

    def ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is complete, and begin with the buckets that now are.

        Buckets begin in their order on every rank, whatever the order of the gradients.
        """
        self._bucket_of[parameter].missing -= 1
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.buckets[self._next].start(self.group.torch_group, dtype=self._dtype)
            self._next += 1


def _fill(parameters: Iterable[nn.Parameter], *, limit: int) -> list[GradientBucket]:
    """Group parameters in reverse order, which is about the order of their gradients."""
    trained = reversed([p for p in parameters if p.requires_grad])
    return [GradientBucket(bucket) for bucket in buckets(trained, limit=limit)]


class DDP(nn.Module):
    """A module whose replicas' gradients are averaged over a group.

    The module's own parameters keep their names: take them, and its state, from ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: ProcessGroup | None = None,
        sync: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        bucket_size_mb: float = 25.0,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Copy the first rank's parameters and buffers to every rank, and set up synchronisation.

        Args:
            module: On its device, the same on every rank.
            group: Replicas; None is the whole world.
            sync: When gradients are averaged.
            bucket_size_mb: MiB of gradients reduced together.
            broadcast_buffers: Copy the first rank's buffers before each forward in training.
            gradient_as_bucket_view: Let gradients be views into the buckets (overlapped only).
            reduce_dtype: Type in which gradients are summed; None: their own.
        """
        super().__init__()
        self.module = module
        self.sync = GradSyncStrategy(sync)
        self.group = group or default_group()
        self._broadcast_buffers = broadcast_buffers
        self._enabled = True
        self._queued = False
        self._torch: nn.parallel.DistributedDataParallel | None = None
        self.sync_parameters()
        self.synchronizer = GradientSynchronizer(
            module.parameters(),
            group=self.group,
            bucket_size_mb=bucket_size_mb,
            reduce_dtype=reduce_dtype,
        )
        if self.group.size == 1 or self.sync is GradSyncStrategy.NO_SYNC:
            return
        # torch's reducer knows neither DTensors nor another type of the sum.
        plain = not any(isinstance(p, DTensor) for p in module.parameters())
        if self.sync is GradSyncStrategy.OVERLAPPED and plain and reduce_dtype is None:
            options: dict[str, Any] = {
                "bucket_cap_mb": bucket_size_mb,
                "gradient_as_bucket_view": gradient_as_bucket_view,
                _BUFFERS_KEYWORD: broadcast_buffers,
            }
            wrapped = nn.parallel.DistributedDataParallel(
                module, process_group=self.group.torch_group, init_sync=False, **options
            )
            # Not a submodule: the parameters would appear twice under two names.
            object.__setattr__(self, "_torch", wrapped)
            return
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; in training, backward then synchronises as ``sync`` says."""
        if self._torch is not None and torch.is_grad_enabled():
            return self._torch(*inputs, **kwargs)
        if self._broadcast_buffers and self.training and self._enabled:
            self.sync_buffers()
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside add to gradients without averaging them."""
        self._enabled = False
        try:
            if self._torch is None:
                yield
            else:
                with self._torch.no_sync():
                    yield
        finally:
            self._enabled = True

    def sync_parameters(self) -> None:
        """Copy the group's first rank's parameters and buffers to all of its ranks."""
        self._copy_from_first(self.module.parameters())
        self.sync_buffers()

    def sync_buffers(self) -> None:
        """Copy the group's first rank's buffers to all of its ranks."""
        self._copy_from_first(self.module.buffers())

    def untouched(self) -> list[str]:
        """Return the parameters that no backward reached, where torch's buckets wait for them all.

        Of a bucket that misses one no gradient is averaged; torch tells that in the next step.
        """
        if self._torch is None:
            return []
        named = self.module.named_parameters()
        return [name for name, one in named if one.requires_grad and one.grad is None]

    def sync_gradients(self) -> None:
        """Average every gradient over the group now."""
        self.synchronizer.sync()

    def _copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        if self.group.size == 1:
            return
        with torch.no_grad():
            works = [
                dist.broadcast(
                    local_part(tensor.detach()),
                    src=self.group.ranks[0],
                    group=self.group.torch_group,
                    async_op=True,
                )
                for tensor in tensors
            ]
        for work in works:
            work.wait()

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Let its bucket know, and ask autograd to finish when the backward that is running ends.

        ``synchronous`` begins with every bucket only then.
        """
        if not self._enabled:
            return
        if self.sync is GradSyncStrategy.OVERLAPPED:
            self.synchronizer.ready(parameter)
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._sync_at_end)

    def _sync_at_end(self) -> None:
        self._queued = False
        self.synchronizer.sync()
