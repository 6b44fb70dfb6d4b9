"""CUDA streams that overlap the copies of one parameter with the update of another.

This module orders copies and computation and keeps their tensors alive. ``streaming`` does the
copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

IN_FLIGHT = 3
"""Number of the largest parameters that fit into the memory of an update: one arriving, one
updated, one leaving. Without a limit, the host would enqueue all parameters, because it does not
wait for the device.
"""


def most_in_flight(sizes: Sequence[int]) -> int:
    """Return the most elements that copies of an update have on the device together.

    It is an upper bound, at most one parameter above the exact number.

    Args:
        sizes: Elements of each parameter.
    """
    return min(sum(sizes), IN_FLIGHT * max(sizes, default=0))


class InOrder:
    """Sequential execution, as on a CPU."""

    @contextmanager
    def arriving(self, size: int, *, largest: int) -> Iterator[None]:
        """Return a context for copying a parameter from the host; later work can use the copies.

        The copies must not read tensors on the device.

        Args:
            size: Elements of the parameter.
            largest: Elements of the largest parameter of the update.
        """
        del size, largest
        yield

    @contextmanager
    def leaving(self, *held: object) -> Iterator[None]:
        """Return a context for copying a parameter back, ordered after all work enqueued before it.

        Args:
            held: Objects that must stay alive until the copies are done.
        """
        del held
        yield

    def finish(self) -> None:
        """Wait until all copies to the host are done, before the host reads them."""


class CopyStreams(InOrder):
    """Copies in both directions concurrently with the computation of the current stream.

    PCIe transfers in both directions at once, and copies use no multiprocessors. Objects held by
    ``leaving`` are freed by the host after their copies are done. The allocator tracks only one
    stream for each block of memory and would otherwise reuse the memory too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_device, self._to_host = (torch.cuda.Stream(device) for _ in range(2))
        self._held: deque[tuple[torch.cuda.Event, int, tuple[object, ...]]] = deque()
        self._arrived = 0

    @contextmanager
    def arriving(self, size: int, *, largest: int) -> Iterator[None]:
        """Copy a parameter to the device during backward and earlier updates, when there is room.

        Host memory is complete when an update begins: ``finish`` has waited for the previous one,
        and ``fully_shard`` for the gradients. So the first copies do not wait for the backward.
        """
        while self._held and size + sum(held for _, held, _ in self._held) > IN_FLIGHT * largest:
            left, _, _ = self._held.popleft()
            left.synchronize()
        self._arrived = size
        with torch.cuda.stream(self._to_device):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)

    @contextmanager
    def leaving(self, *held: object) -> Iterator[None]:
        """Copy a parameter back during the next update."""
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            yield
        self._held.append((self._to_host.record_event(), self._arrived, held))

    def finish(self) -> None:
        """Wait for copies to the host; work enqueued later is ordered after them."""
        self._to_host.synchronize()
        self._held.clear()


def copy_streams(device: torch.device | None) -> InOrder:
    """Return the ordering of copies for a device; None means parameters stay in place."""
    return CopyStreams(device) if device is not None and device.type == "cuda" else InOrder()
