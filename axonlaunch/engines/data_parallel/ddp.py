"""Replicated data parallelism: every rank holds the full model, and gradients are averaged.

This module averages gradients and copies parameters and buffers. It does not update parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.averaging.gradient_bucket import broadcast_tensors
from axonlaunch.comm.process_group import default_group
from axonlaunch.engines.data_parallel.gradient_synchronizer import (
    GradientSynchronizer,
    GradSyncStrategy,
)
from axonlaunch.engines.data_parallel.torch_internals import (
    BUFFERS_KEYWORD,
    FixedBuckets,
    call_after_backward,
    ignored_names,
)


class DDP(nn.Module):
    """A module with gradients averaged over the replicas of a group.

    Parameter names are those of the original module: use ``module`` for parameters and state.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        sync: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        bucket_size_mb: float = 25.0,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        reduce_dtype: torch.dtype | None = None,
        scatters_rows: bool = False,
        waits_in_backward: bool = False,
    ) -> None:
        """Copy the first rank's parameters and buffers to all ranks and set up synchronization.

        Args:
            module: The module, on its device, with the same structure on every rank.
            group: The replicas; None for the whole world.
            sync: When gradients are averaged.
            bucket_size_mb: MiB of gradients per bucket.
            broadcast_buffers: Copy the first rank's buffers before each forward in training.
                Buffers that are not saved (tables of positions) are excluded, because they are
                equal on all ranks.
            gradient_as_bucket_view: Make gradients views into the buckets (only with
                ``overlapped``).
            find_unused_parameters: Do not wait (in ``overlapped``) for gradients of parameters
                that a forward did not use; torch then traverses the graph of each output. A
                parameter that this rank did not use counts as zero. The other strategies never
                wait.
            reduce_dtype: Type in which gradients are summed; None for the type of the gradients.
            scatters_rows: Give each rank only the mean gradient of its rows, in
                ``synchronizer.rows``. Required by an update that is divided by rows.
            waits_in_backward: Free buckets during backward, see ``GradientSynchronizer`` (only with
                ``overlapped``).
        """
        super().__init__()
        self.module = module
        self.sync = GradSyncStrategy(sync)
        self.group = group or default_group()
        self._broadcast_buffers = broadcast_buffers
        self._enabled = True
        self._queued = False
        self._waits_for_all = not find_unused_parameters
        self._torch: FixedBuckets | None = None
        # torch's DDP also ignores the names that the module declares.
        ignored = ignored_names(module)
        self._ignored = ignored | (dict(module.named_buffers()).keys() - module.state_dict().keys())
        self.sync_parameters()
        self.synchronizer = GradientSynchronizer(
            module.parameters(),
            group=self.group,
            strategy=self.sync,
            bucket_size_mb=bucket_size_mb,
            reduce_dtype=reduce_dtype,
            scatters_rows=scatters_rows,
            waits_in_backward=waits_in_backward,
        )
        if self.group.size == 1 or self.sync is GradSyncStrategy.NO_SYNC:
            return
        uses_torch_ddp = reduce_dtype is None and not scatters_rows and _suits_reducer(module)
        if self.sync is GradSyncStrategy.OVERLAPPED and uses_torch_ddp:
            options: dict[str, Any] = {
                "bucket_cap_mb": bucket_size_mb,
                "gradient_as_bucket_view": gradient_as_bucket_view,
                "find_unused_parameters": find_unused_parameters,
                BUFFERS_KEYWORD: broadcast_buffers,
            }
            wrapped = FixedBuckets(
                module,
                ignored=self._ignored,
                process_group=self.group.torch_group,
                init_sync=False,
                **options,
            )
            # Not a submodule, because each parameter would then appear under two names.
            object.__setattr__(self, "_torch", wrapped)
            return
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. In training, the next backward synchronizes according to ``sync``."""
        if self._torch is not None and torch.is_grad_enabled():
            return self._torch(*inputs, **kwargs)
        if self._queued and torch.is_grad_enabled():
            self._forget_failed_backward()
        # Check the wrapped module's mode: evaluation code may set only that.
        if self._broadcast_buffers and self.module.training and self._enabled:
            self.sync_buffers()
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging in backward passes inside the context."""
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
        """Copy parameters and buffers from the group's first rank to all its ranks."""
        self._copy_from_first(self.module.parameters())
        self._copy_from_first(self.module.buffers())

    def sync_buffers(self) -> None:
        """Copy the saved buffers from the group's first rank to all its ranks."""
        named = self.module.named_buffers()
        self._copy_from_first(buffer for name, buffer in named if name not in self._ignored)

    def has_averaged(self) -> bool:
        """Return whether the last backward filled all of torch's buckets; true without torch's DDP.

        If a bucket misses a gradient, none of its gradients is averaged. Torch reports that only in
        the next step, after an update that makes the replicas diverge, and never for the last step.
        The check needs no synchronization with the device.
        """
        if self._torch is None or not self._waits_for_all:
            return True
        return self._torch.is_complete()

    def parameters_without_grad(self) -> list[str]:
        """Return the names of trained parameters that no backward of this step reached."""
        named = self.module.named_parameters()
        return [
            name for name, parameter in named if parameter.requires_grad and parameter.grad is None
        ]

    def sync_gradients(self) -> None:
        """Average all gradients over the group now."""
        self.synchronizer.sync_all()

    def _copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        if self.group.size > 1:
            detached = (tensor.detach() for tensor in tensors)
            first, group = self.group.ranks[0], self.group.torch_group
            broadcast_tensors(detached, source=first, group=group)

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Report a complete gradient and schedule the end of this backward's synchronization."""
        if not self._enabled:
            return
        self.synchronizer.add_gradient(parameter)
        if not self._queued:
            self._queued = True
            call_after_backward(self._sync_at_end)

    def _forget_failed_backward(self) -> None:
        """Reset after a backward that raised; autograd has dropped the callback at its end.

        Without the reset, the next backward would not synchronize, and every rank would continue
        with its local gradients.
        """
        self._queued = False
        self.synchronizer.clear()

    def _sync_at_end(self) -> None:
        self._queued = False
        self.synchronizer.sync_all()


DistributedDataParallel = DDP
"""Another name for ``DDP``."""


def _suits_reducer(module: nn.Module) -> bool:
    """Return whether torch's reducer can average the gradients of a module.

    It supports neither DTensors nor gradients of another type than their parameters. It can neither
    sum in another type nor by rows.
    """
    return not any(isinstance(p, DTensor) or p.grad_dtype != p.dtype for p in module.parameters())
