"""Replicated data parallelism: every rank holds the whole model, gradients are averaged.

It averages gradients and copies parameters and buffers; it updates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.gradient_bucket import broadcast_tensors
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
    """A module whose replicas' gradients are averaged over a group.

    The module's own parameters keep their names: take them, and its state, from ``module``.
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
        """Copy the first rank's parameters and buffers to every rank, and set up synchronisation.

        Args:
            module: On its device, the same on every rank.
            group: Replicas; None is the whole world.
            sync: When gradients are averaged.
            bucket_size_mb: MiB of gradients reduced together.
            broadcast_buffers: Copy the first rank's buffers before each forward in training, but
                for those that are not saved: tables of positions are the same on every rank.
            gradient_as_bucket_view: Let gradients be views into the buckets (overlapped only).
            find_unused_parameters: Let ``overlapped`` not wait for gradients of parameters that a
                forward left out, for which torch goes through the graph of each output. A rank's
                own left-out parameter counts as zero. The other strategies never wait.
            reduce_dtype: Type in which gradients are summed; None: their own.
            scatters_rows: Give each rank the mean gradient of its own rows alone, in
                ``synchronizer.rows``, for an update that is divided so.
            waits_in_backward: As ``GradientSynchronizer`` takes it (overlapped only).
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
        # torch's DDP leaves out what the module names so.
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
        # torch's reducer knows neither DTensors nor another type of the sum, nor rows.
        plain = not any(isinstance(p, DTensor) for p in module.parameters())
        is_torchs = plain and reduce_dtype is None and not scatters_rows
        if self.sync is GradSyncStrategy.OVERLAPPED and is_torchs:
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
        if self._queued and torch.is_grad_enabled():
            self._forget_failed_backward()
        # The module's mode: who evaluates it need not know of what it is wrapped in.
        if self._broadcast_buffers and self.module.training and self._enabled:
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
        self._copy_from_first(self.module.buffers())

    def sync_buffers(self) -> None:
        """Copy the group's first rank's buffers, those that are saved, to all of its ranks."""
        named = self.module.named_buffers()
        self._copy_from_first(buffer for name, buffer in named if name not in self._ignored)

    def has_averaged(self) -> bool:
        """Return whether the last backward filled all of torch's buckets, where torch averages.

        Of a bucket that misses a gradient none is averaged. Torch reports that in the next step,
        which the last one has not, and after an update by which replicas are apart. The host knows:
        nothing waits for a device.
        """
        if self._torch is None or not self._waits_for_all:
            return True
        return self._torch.is_complete()

    def parameters_without_grad(self) -> list[str]:
        """Return the trained parameters that no backward of this step reached."""
        named = self.module.named_parameters()
        return [
            name for name, parameter in named if parameter.requires_grad and parameter.grad is None
        ]

    def sync_gradients(self) -> None:
        """Average every gradient over the group now."""
        self.synchronizer.sync_all()

    def _copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        if self.group.size > 1:
            detached = (tensor.detach() for tensor in tensors)
            first, group = self.group.ranks[0], self.group.torch_group
            broadcast_tensors(detached, source=first, group=group)

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Let its bucket know, and ask autograd to finish when this backward ends."""
        if not self._enabled:
            return
        self.synchronizer.add_gradient(parameter)
        if not self._queued:
            self._queued = True
            call_after_backward(self._sync_at_end)

    def _forget_failed_backward(self) -> None:
        """Begin again after a backward that raised: autograd then drops what was to end it.

        The next one would send nothing, and every rank would go on by its own gradients.
        """
        self._queued = False
        self.synchronizer.clear()

    def _sync_at_end(self) -> None:
        self._queued = False
        self.synchronizer.sync_all()


DistributedDataParallel = DDP
"""Another name for ``DDP``."""
