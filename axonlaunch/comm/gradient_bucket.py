"""Gradients laid out flat, so that many of them travel as one message.

It holds and averages values; which gradients go together, and when, is for others to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

BUCKET_BYTES = 25 * 2**20
"""Gradients, and other tensors, travel together once they reach this size."""


class GradientBucket:
    """Tensors of one dtype and device, copied one after another into a flat one.

    Attributes:
        capacity: Elements that it has room for.
        size: Elements that are in it.
    """

    def __init__(self, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Make an empty bucket; its storage is allocated with the first tensor.

        Args:
            capacity: Elements that it has room for.
            dtype: Type in which tensors are kept and summed; None: that of the first tensor.

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
        """Whether nothing was added."""
        return not self._shapes

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another element."""
        return self.size >= self.capacity

    @property
    def data(self) -> Tensor:
        """What is in it, flat, [size]; writing to it writes to the bucket."""
        if self._storage is None:
            return torch.empty(0, dtype=self._dtype)
        return self._storage[: self.size]

    def add(self, tensor: Tensor) -> bool:
        """Copy a tensor, or a DTensor's local part, behind what is there.

        Returns:
            Whether there was room; without it nothing changes.

        Raises:
            ValueError: Its dtype or device is not that of the tensors before.
        """
        return self.add_all([tensor])

    @torch.no_grad()
    def add_all(self, tensors: Sequence[Tensor]) -> bool:
        """Copy tensors behind what is there, all of them or, without room for all, none.

        Args:
            tensors: Of any shapes; of a DTensor this rank's part is copied.

        Returns:
            Whether there was room.

        Raises:
            ValueError: Their dtypes or devices are not one, or not those of the tensors before.
        """
        gradients = [_local(tensor.detach()) for tensor in tensors]
        added = sum(part.numel() for part in gradients)
        if self.size + added > self.capacity:
            return False
        if not gradients:
            return True
        self._refuse_another_kind(gradients)
        if self._storage is None:
            self._source = gradients[0].dtype
            self._storage = gradients[0].new_empty(self.capacity, dtype=self._dtype)
        place = self._storage[self.size : self.size + added]
        torch.cat([part.reshape(-1) for part in gradients], out=place)
        self._shapes += [part.shape for part in gradients]
        self.size += added
        return True

    def extract(self) -> list[Tensor]:
        """Return what was added, in order and shape: views into ``data``."""
        flat = self.data.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(flat, self._shapes, strict=True)]

    def clear(self) -> None:
        """Empty it and let its storage go; views that were extracted keep theirs."""
        if self._work is not None:
            self._work.wait()
        self._storage, self._source, self._work = None, None, None
        self._shapes, self.size = [], 0

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to average ``data`` over a group, all of whose ranks call this with equal sizes."""
        source = self._source or self.data.dtype
        operation = begin_mean(self.data, source=source, group=group)
        self._work = dist.all_reduce(self.data, operation, group=group, async_op=True)

    def finish(self) -> None:
        """Wait until ``data`` is the mean over the group."""
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
    """Return the reduction that makes a mean of what ranks send, and prepare it in place.

    Args:
        data: What this rank sends.
        source: The type that it had. Of a smaller one the sum could overflow.
        group: The ranks.
    """
    if data.dtype.itemsize >= source.itemsize:
        return dist.ReduceOp.AVG  # which saves a pass over them
    data.div_(dist.get_world_size(group))
    return dist.ReduceOp.SUM


def buckets(tensors: Iterable[AnyTensor], *, limit: int) -> Iterator[list[AnyTensor]]:
    """Yield tensors of one type and device that reach so many bytes together, then what is left.

    Args:
        tensors: In the order in which they are taken.
        limit: Bytes from which a bucket is full; its last tensor may take it above.

    Yields:
        A bucket of at least ``limit`` bytes as soon as it is full; at the end the others.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    for tensor in tensors:
        bucket = filling.setdefault((tensor.dtype, tensor.device), [])
        bucket.append(tensor)
        if sum(gradient.numel() * gradient.element_size() for gradient in bucket) >= limit:
            yield filling.pop((tensor.dtype, tensor.device))
    yield from filling.values()


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], *, source: int, group: dist.ProcessGroup) -> None:
    """Give every rank of a group one rank's values, in place, many small tensors in a message.

    Args:
        tensors: The same on every rank, but for their values.
        source: The global rank.
        group: Its ranks all call this.
    """
    works: list[tuple[dist.Work, Tensor | None, list[Tensor]]] = []
    for together in buckets(map(_local, tensors), limit=BUCKET_BYTES):
        flat = (
            None if len(together) == 1 else torch.cat([tensor.reshape(-1) for tensor in together])
        )
        sent = together[0] if flat is None else flat
        works.append((dist.broadcast(sent, source, group=group, async_op=True), flat, together))
    for work, flat, together in works:
        work.wait()
        if flat is not None:
            parts = flat.split([tensor.numel() for tensor in together])
            views = [part.view(tensor.shape) for part, tensor in zip(parts, together, strict=True)]
            torch._foreach_copy_(together, views)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
