"""Gradients in flat buckets, so that many of them are communicated in one message.

The caller decides which gradients share a bucket, and when it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm.mesh import local_part

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

BUCKET_BYTES = 25 * 2**20
"""Size from which gradients, and other tensors, are communicated together."""


class GradientBucket:
    """Tensors of one dtype and device, copied one after another into a flat tensor.

    Attributes:
        capacity: Maximum number of elements.
        size: Current number of elements.
    """

    def __init__(self, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Create an empty bucket; its storage is allocated with the first tensor.

        Args:
            capacity: Maximum number of elements.
            dtype: Dtype of storage and sum; None uses the dtype of the first tensor.

        Raises:
            ValueError: The capacity is negative.
        """
        if capacity < 0:
            raise ValueError(f"capacity={capacity}: use 0 or more elements")
        self.capacity = capacity
        self.size = 0
        self._dtype = dtype
        self._storage: Tensor | None = None
        self._shapes: list[torch.Size] = []
        self._source: torch.dtype | None = None
        self._work: dist.Work | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the bucket has no tensors."""
        return not self._shapes

    @property
    def is_full(self) -> bool:
        """Whether no element fits in the bucket any more."""
        return self.size >= self.capacity

    @property
    def data(self) -> Tensor:
        """The contents as a flat view, [size]; writing to it changes the bucket."""
        if self._storage is None:
            return torch.empty(0, dtype=self._dtype)
        return self._storage[: self.size]

    def add(self, tensor: Tensor) -> bool:
        """Append a copy of a tensor, or of a DTensor's local part.

        Returns:
            Whether there was room; otherwise the bucket is unchanged.

        Raises:
            ValueError: Dtype or device differ from those of earlier tensors.
        """
        return self.add_all([tensor])

    @torch.no_grad()
    def add_all(self, tensors: Sequence[Tensor]) -> bool:
        """Append copies of all tensors, or of none if not all of them fit.

        Args:
            tensors: Tensors of any shapes; for a DTensor, this rank's part is copied.

        Returns:
            Whether there was room.

        Raises:
            ValueError: Dtypes or devices differ between these tensors, or from earlier ones.
        """
        gradients = [local_part(tensor.detach()) for tensor in tensors]
        num_added = sum(part.numel() for part in gradients)
        if self.size + num_added > self.capacity:
            return False
        if not gradients:
            return True
        self._refuse_another_kind(gradients)
        if self._storage is None:
            self._source = gradients[0].dtype
            self._storage = gradients[0].new_empty(self.capacity, dtype=self._dtype)
        target = self._storage[self.size : self.size + num_added]
        torch.cat([part.reshape(-1) for part in gradients], out=target)
        self._shapes += [part.shape for part in gradients]
        self.size += num_added
        return True

    def extract(self) -> list[Tensor]:
        """Return the tensors in order and with their shapes, as views of ``data``."""
        flat = self.data.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(flat, self._shapes, strict=True)]

    def clear(self) -> None:
        """Empty the bucket and release its storage; extracted views keep theirs."""
        if self._work is not None:
            self._work.wait()
        self._storage, self._source, self._work = None, None, None
        self._shapes, self.size = [], 0

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to average ``data`` over a group; all its ranks must call this with equal sizes."""
        source = self._source or self.data.dtype
        operation = begin_mean(self.data, source=source, group=group)
        self._work = dist.all_reduce(self.data, operation, group=group, async_op=True)

    def finish(self) -> None:
        """Wait until ``data`` contains the mean over the group."""
        assert self._work is not None, "nothing was started"
        self._work.wait()
        self._work = None

    def _refuse_another_kind(self, gradients: Sequence[Tensor]) -> None:
        if self._storage is None:
            first = (gradients[0].dtype, gradients[0].device)
        else:
            assert self._source is not None
            first = (self._source, self._storage.device)
        for dtype, device in ((part.dtype, part.device) for part in gradients):
            if (dtype, device) != first:
                raise ValueError(
                    f"a tensor of {dtype} on {device} can't join those of {first[0]} on "
                    f"{first[1]}: use a bucket for each dtype and device"
                )


def begin_mean(
    data: Tensor, *, source: torch.dtype, group: dist.ProcessGroup
) -> dist.ReduceOp.RedOpType:
    """Return the reduction for a mean over ranks, and scale ``data`` in place if necessary.

    Args:
        data: Values that this rank sends.
        source: Dtype before conversion. If ``data`` has a smaller dtype, it is divided first,
            because the sum could overflow.
        group: Group of ranks.
    """
    if data.dtype.itemsize >= source.itemsize:
        return dist.ReduceOp.AVG  # saves a pass over the data
    data.div_(dist.get_world_size(group))
    return dist.ReduceOp.SUM


def buckets(tensors: Iterable[AnyTensor], *, limit: int) -> Iterator[list[AnyTensor]]:
    """Group tensors of one dtype and device into lists that reach ``limit`` bytes.

    Args:
        tensors: Tensors in the order in which they are grouped.
        limit: Size in bytes from which a bucket is full; its last tensor may exceed it.

    Yields:
        A bucket when it reaches ``limit``; at the end the remaining buckets.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault((tensor.dtype, tensor.device), [])
        bucket.append(tensor)
        if sum(member.numel() * member.element_size() for member in bucket) >= limit:
            yield open_buckets.pop((tensor.dtype, tensor.device))
    yield from open_buckets.values()


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], *, source: int, group: dist.ProcessGroup) -> None:
    """Copy one rank's values to all ranks of a group in place; small tensors share messages.

    Args:
        tensors: Tensors that differ between ranks only in their values.
        source: Global rank to copy from.
        group: Group of ranks that all call this.
    """
    works: list[tuple[dist.Work, Tensor | None, list[Tensor]]] = []
    for members in buckets(map(local_part, tensors), limit=BUCKET_BYTES):
        # gloo would send the memory of a view with its gaps, whatever its strides.
        is_one_block = len(members) == 1 and members[0].is_contiguous()
        flat = None if is_one_block else torch.cat([tensor.reshape(-1) for tensor in members])
        message = members[0].view(-1) if flat is None else flat
        works.append((dist.broadcast(message, source, group=group, async_op=True), flat, members))
    for work, flat, members in works:
        work.wait()
        if flat is not None:
            parts = flat.split([tensor.numel() for tensor in members])
            views = [part.view(tensor.shape) for part, tensor in zip(parts, members, strict=True)]
            torch._foreach_copy_(members, views)
