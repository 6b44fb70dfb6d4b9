"""Averages the gradients of replicas in buckets and decides when each bucket is sent.

Only gradients are communicated here; parameters and buffers are copied by ``DDP``.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.averaging.gradient_bucket import GradientBucket, buckets
from axonlaunch.comm.averaging.row_bucket import RowBucket
from axonlaunch.comm.process_group import default_group
from axonlaunch.engines.data_parallel.gradient_shares import (
    GradientShare,
    RowGradients,
    WholeGradients,
)


class GradSyncStrategy(StrEnum):
    """Time at which gradients are averaged over replicas."""

    OVERLAPPED = "overlapped"
    """buckets are reduced during backward, if possible by torch's DistributedDataParallel"""
    SYNCHRONOUS = "synchronous"
    """buckets are reduced at the end of every backward"""
    NO_SYNC = "no_sync"
    """backward sends nothing; call ``sync_gradients`` before the update"""


TRAVELING = 2
"""Maximum number of buckets in flight; earlier ones have arrived and their memory is free."""


class GradientSynchronizer:
    """Averages gradients over a group in buckets, in reverse order of the parameters.

    For a DTensor, this rank's shard is averaged; all replicas hold the same shard.

    Attributes:
        group: Ranks that hold the same parameters.
        strategy: When buckets are sent. With ``overlapped``, a bucket is sent as soon as its
            gradients and those of all earlier buckets are complete; otherwise in ``sync_all``.
        rows: Mean gradient of this rank's rows, by parameter, if ``scatters_rows`` is set;
            otherwise empty. The caller clears it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] = (),
        *,
        group: ProcessGroup | None = None,
        strategy: GradSyncStrategy | str = GradSyncStrategy.SYNCHRONOUS,
        bucket_size_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
        scatters_rows: bool = False,
        waits_in_backward: bool = False,
    ) -> None:
        """Assign parameters to buckets.

        Args:
            parameters: The parameters, see ``prepare``.
            group: The replicas; None for the whole world.
            strategy: When buckets are sent.
            bucket_size_mb: MiB of gradients per bucket.
            reduce_dtype: Type in which gradients are summed; None for the type of the gradients.
            scatters_rows: Give each of several ranks only the mean gradient of its rows, in
                ``rows``, and free the full gradients. This halves the communicated bytes.
            waits_in_backward: Wait during backward, except for the last ``TRAVELING`` buckets, to
                free their memory. Must be false if backward passes of the group wait for each
                other, as those of ranks that share a sequence do: a rank without some gradient
                sends that bucket last, and would wait for ranks that are waiting for this bucket.
        """
        self.group = group or default_group()
        self.strategy = GradSyncStrategy(strategy)
        self._limit = int(bucket_size_mb * 2**20)
        self._dtype = reduce_dtype
        self._scatters_rows = scatters_rows
        self._waits_in_backward = waits_in_backward
        self.rows: dict[Tensor, Tensor] = {}
        self._shares: list[GradientShare] = []
        self._share_of: dict[nn.Parameter, GradientShare] = {}
        self._started = self._finished = 0
        self.prepare(parameters)

    @property
    def buckets(self) -> list[GradientBucket | RowBucket]:
        """The buckets in sending order. Each ends with one flag per gradient."""
        return [share.bucket for share in self._shares]

    def prepare(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assign the trained parameters to new buckets and drop the previous buckets.

        Parameters are taken in reverse order, which is roughly the order of their gradients.
        """
        self.clear()
        trained = reversed([p for p in parameters if p.requires_grad])
        self._shares = [
            self._share(bucket_parameters)
            for bucket_parameters in buckets(trained, limit=self._limit)
        ]
        self._share_of = {p: share for share in self._shares for p in share.parameters}

    def add_gradient(self, parameter: nn.Parameter) -> None:
        """Mark ``parameter.grad`` as complete; with ``overlapped``, send complete buckets.

        Buckets are sent in the same order on every rank, independent of the order of the gradients.

        Raises:
            ValueError: The parameter was not passed to ``prepare``.
        """
        if parameter not in self._share_of:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is in no bucket: pass every trained "
                "parameter to prepare()"
            )
        self._share_of[parameter].missing.discard(parameter)
        if self.strategy is not GradSyncStrategy.OVERLAPPED or self.group.size == 1:
            return
        while self._started < len(self._shares) and not self._shares[self._started].missing:
            self._start_next()
            if self._waits_in_backward:
                self._finish(self._started - TRAVELING)

    def sync_all(self) -> None:
        """Replace every gradient by its mean over the group. All ranks must call it."""
        if self.group.size == 1:
            return
        while self._started < len(self._shares):
            self._start_next()
            self._finish(self._started - TRAVELING)
        self._finish(self._started)
        self._started = self._finished = 0

    def clear(self) -> None:
        """Wait for buckets in flight and mark all gradients as incomplete."""
        for share in self._shares:
            share.clear()
        self._started = self._finished = 0

    def _share(self, parameters: list[nn.Parameter]) -> GradientShare:
        if self._scatters_rows:
            return RowGradients(parameters, group=self.group, dtype=self._dtype, rows=self.rows)
        return WholeGradients(parameters, group=self.group, dtype=self._dtype)

    def _start_next(self) -> None:
        self._shares[self._started].start()
        self._started += 1

    def _finish(self, count: int) -> None:
        """Wait for the first ``count`` buckets."""
        while self._finished < count:
            self._shares[self._finished].finish()
            self._finished += 1
