"""Averages the gradients of replicas, bucket by bucket, and says when a bucket goes.

It moves gradients and nothing else: parameters and buffers are ``DDP``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import torch
from torch import nn

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.gradient_bucket import GradientBucket, buckets
from axonlaunch.comm.process_group import default_group
from axonlaunch.engines.optimizer.step import local_part


class GradSyncStrategy(StrEnum):
    """When replicas agree on gradients."""

    OVERLAPPED = "overlapped"
    """buckets are reduced during backward; plain ones by torch's DistributedDataParallel"""
    SYNCHRONOUS = "synchronous"
    """buckets are reduced at the end of every backward"""
    NO_SYNC = "no_sync"
    """backward sends nothing; call ``sync_gradients`` before the update"""


class _Share:
    """Parameters whose gradients travel in one bucket, and which of them are not complete yet."""

    def __init__(self, parameters: list[nn.Parameter], *, dtype: torch.dtype | None) -> None:
        self.parameters = parameters
        elements = sum(local_part(parameter.detach()).numel() for parameter in parameters)
        # Behind the gradients, for each: whether there was one.
        self.bucket = GradientBucket(elements + len(parameters), dtype=dtype)
        self.missing = set(parameters)
        self._absent: list[int] = []

    def start(self, group: ProcessGroup) -> None:
        """Fill the bucket and send it.

        A missing gradient counts as zero, so that ranks which used different parts agree.
        """
        self._absent = [n for n, parameter in enumerate(self.parameters) if parameter.grad is None]
        for number in self._absent:
            self.parameters[number].grad = torch.zeros_like(self.parameters[number])
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        present = local_part(gradients[0]).new_ones(len(gradients))
        if self._absent:  # an index from the host, for which it waits until the device has it
            present[self._absent] = 0.0
        has_room = self.bucket.add_all([*gradients, present])
        assert has_room
        self.bucket.start(group.torch_group)

    def finish(self) -> None:
        """Wait for the mean and give each parameter its own.

        What no rank had a gradient of has none, as in one process: weight decay leaves it alone.
        """
        self.bucket.finish()
        gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        *means, present = self.bucket.extract()
        torch._foreach_copy_(gradients, means)
        # Looked at where one was missing, for it makes the host wait for the device.
        for number in self._absent:
            if not present[number]:
                self.parameters[number].grad = None
        self.clear()

    def clear(self) -> None:
        """Reset to the state before a backward."""
        self.bucket.clear()
        self.missing = set(self.parameters)


class GradientSynchronizer:
    """Averages gradients over a group, bucket by bucket, in reverse order of the parameters.

    Of a DTensor it is this rank's part that is averaged: replicas hold the same part.

    Attributes:
        group: The replicas.
        strategy: When a bucket goes: under ``overlapped`` once the gradients in it, and in those
            before it, are complete; otherwise with ``sync_all``.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] = (),
        *,
        group: ProcessGroup | None = None,
        strategy: GradSyncStrategy | str = GradSyncStrategy.SYNCHRONOUS,
        bucket_size_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Divide parameters among buckets.

        Args:
            parameters: As ``prepare`` takes them.
            group: Replicas; None is the whole world.
            strategy: When a bucket goes.
            bucket_size_mb: MiB of gradients reduced together.
            reduce_dtype: Type in which gradients are summed; None: their own.
        """
        self.group = group or default_group()
        self.strategy = GradSyncStrategy(strategy)
        self._limit = int(bucket_size_mb * 2**20)
        self._dtype = reduce_dtype
        self._shares: list[_Share] = []
        self._share_of: dict[nn.Parameter, _Share] = {}
        self._started = 0
        self.prepare(parameters)

    @property
    def buckets(self) -> list[GradientBucket]:
        """The buckets in the order in which they go; each ends with a number for each gradient."""
        return [share.bucket for share in self._shares]

    def prepare(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the parameters that need a gradient among buckets, in place of those before.

        They are taken in reverse order, which is about the order of their gradients.
        """
        self.clear()
        trained = reversed([p for p in parameters if p.requires_grad])
        self._shares = [
            _Share(together, dtype=self._dtype) for together in buckets(trained, limit=self._limit)
        ]
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

    def sync_all(self) -> None:
        """Replace every gradient by its mean over the group; all its ranks call this."""
        if self.group.size == 1:
            return
        while self._started < len(self._shares):
            self._start_next()
        for share in self._shares:
            share.finish()
        self._started = 0

    def clear(self) -> None:
        """Forget which gradients are complete, once what was sent has arrived."""
        for share in self._shares:
            share.clear()
        self._started = 0

    def _start_next(self) -> None:
        self._shares[self._started].start(self.group)
        self._started += 1
