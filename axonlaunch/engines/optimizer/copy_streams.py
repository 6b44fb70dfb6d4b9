"""CUDA streams that overlap the copies of one parameter with the update of another.

This module orders copies and computation and keeps their tensors alive. ``streaming`` does the
copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

IN_FLIGHT = 3
"""Maximum number of matrices on the device: one arriving, one updated, one leaving.

Without a limit, the host would enqueue all of them, because it does not wait for the device.
"""


def left_before(are_matrices: Iterable[bool]) -> list[int]:
    """Return how many of the first parameters have left the device before each one arrives.

    Vectors do not count, so that matrices overlap as well with norms and biases between them as
    without. The copies on the device follow from this alone, because the host frees them only to
    make room. In the example the fourth matrix waits for the first one:

        matrix, vector, matrix, matrix, vector, matrix    gives    0, 0, 0, 0, 0, 1

    Args:
        are_matrices: Whether a parameter has two dims or more, for each one in order.
    """
    counts: list[int] = []
    held: deque[int] = deque()
    num_left = 0
    for position, is_matrix in enumerate(are_matrices):
        if is_matrix:
            if len(held) == IN_FLIGHT:
                num_left = held.popleft() + 1
            held.append(position)
        counts.append(num_left)
    return counts


class InOrder:
    """Sequential execution, as on a CPU."""

    @contextmanager
    def arriving(self, left: int) -> Iterator[None]:
        """Return a context for copying a parameter from the host; later work can use the copies.

        The copies must not read tensors on the device.

        Args:
            left: Number of the first parameters whose copies must have left, from ``left_before``.
        """
        del left
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
        self._held: deque[tuple[torch.cuda.Event, tuple[object, ...]]] = deque()
        self._num_left = 0

    @contextmanager
    def arriving(self, left: int) -> Iterator[None]:
        """Copy a parameter to the device during backward and earlier updates, when there is room.

        Host memory is complete when an update begins: ``finish`` has waited for the previous one,
        and ``fully_shard`` for the gradients. So the first copies do not wait for the backward.
        """
        while self._num_left < left:
            self._held[0][0].synchronize()  # its copies stay alive until then, and no longer
            self._held.popleft()
            self._num_left += 1
        with torch.cuda.stream(self._to_device):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)

    @contextmanager
    def leaving(self, *held: object) -> Iterator[None]:
        """Copy a parameter back during the next update."""
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            yield
        self._held.append((self._to_host.record_event(), held))

    def finish(self) -> None:
        """Wait for copies to the host; work enqueued later is ordered after them."""
        self._to_host.synchronize()
        self._held.clear()
        self._num_left = 0


def copy_streams(device: torch.device | None) -> InOrder:
    """Return the ordering of copies for a device; None means parameters stay in place."""
    return CopyStreams(device) if device is not None and device.type == "cuda" else InOrder()
