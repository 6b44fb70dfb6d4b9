"""Averages the gradients of replicas, bucket by bucket, and says when a bucket goes.

It moves gradients and nothing else: parameters and buffers are ``DDP``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import torch
from torch import Tensor, nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.gradient_bucket import GradientBucket, buckets
from axonlaunch.comm.process_group import default_group
from axonlaunch.comm.row_bucket import RowBucket
from axonlaunch.engines.data_parallel.gradient_shares import (
    GradientShare,
    RowGradients,
    WholeGradients,
)


class GradSyncStrategy(StrEnum):
    """When replicas agree on gradients."""

    OVERLAPPED = "overlapped"
    """buckets are reduced during backward; plain ones by torch's DistributedDataParallel"""
    SYNCHRONOUS = "synchronous"
    """buckets are reduced at the end of every backward"""
    NO_SYNC = "no_sync"
    """backward sends nothing; call ``sync_gradients`` before the update"""


TRAVELLING = 2
"""Buckets that are on their way at once: those before have arrived, and what they took is free."""


class GradientSynchronizer:
    """Averages gradients over a group, bucket by bucket, in reverse order of the parameters.

    Of a DTensor it is this rank's part that is averaged: replicas hold the same part.

    Attributes:
        group: The replicas.
        strategy: When a bucket goes: under ``overlapped`` once the gradients in it, and in those
            before it, are complete; otherwise with ``sync_all``.
        rows: With ``scatters_rows``, the mean gradient of this rank's rows by parameter, until
            somebody clears it; otherwise empty.
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
        """Divide parameters among buckets.

        Args:
            parameters: As ``prepare`` takes them.
            group: Replicas; None is the whole world.
            strategy: When a bucket goes.
            bucket_size_mb: MiB of gradients reduced together.
            reduce_dtype: Type in which gradients are summed; None: their own.
            scatters_rows: Give each rank, of several, the mean of its own rows alone, in ``rows``,
                and free the whole gradients: half the bytes.
            waits_in_backward: Let a backward wait for all buckets but the last ones, so that what
                they took is free. Not where backwards of the group wait for each other, as those of
                ranks that share a sequence do: one that misses a gradient sends its bucket last,
                and would wait for ranks that wait for this bucket.
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
        """The buckets in the order in which they go; each ends with a number for each gradient."""
        return [share.bucket for share in self._shares]

    def prepare(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the parameters that need a gradient among buckets, in place of those before.

        They are taken in reverse order, which is about the order of their gradients.
        """
        self.clear()
        trained = reversed([p for p in parameters if p.requires_grad])
        self._shares = [self._share(together) for together in buckets(trained, limit=self._limit)]
        self._share_of = {p: share for share in self._shares for p in share.parameters}

    def add_gradient(self, parameter: nn.Parameter) -> None:
        """Note that ``parameter.grad`` is complete; under ``overlapped``, send complete buckets.

        Buckets go in their order on every rank, whatever the order of the gradients.

        Raises:
            ValueError: The parameter was not prepared.
        """
        if parameter not in self._share_of:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is in no bucket: give prepare() "
                "every parameter that is trained"
            )
        self._share_of[parameter].missing.discard(parameter)
        if self.strategy is not GradSyncStrategy.OVERLAPPED or self.group.size == 1:
            return
        while self._started < len(self._shares) and not self._shares[self._started].missing:
            self._start_next()
            if self._waits_in_backward:
                self._finish(self._started - TRAVELLING)

    def sync_all(self) -> None:
        """Replace every gradient by its mean over the group; all its ranks call this."""
        if self.group.size == 1:
            return
        while self._started < len(self._shares):
            self._start_next()
            self._finish(self._started - TRAVELLING)
        self._finish(self._started)
        self._started = self._finished = 0

    def clear(self) -> None:
        """Forget which gradients are complete, once what was sent has arrived."""
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
        """Finish the first so many buckets."""
        while self._finished < count:
            self._shares[self._finished].finish()
            self._finished += 1
