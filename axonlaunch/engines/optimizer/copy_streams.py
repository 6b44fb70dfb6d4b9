"""CUDA streams that overlap the copies of one parameter with the update of another.

This module orders copies and computation and keeps their tensors alive. ``streaming`` does the
copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

IN_FLIGHT = 3
"""Maximum number of parameters on the device: one arriving, one updated, one leaving. Without a
limit, the host would enqueue all of them, because it does not wait for the device.
"""


class InOrder:
    """Sequential execution, as on a CPU."""

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Return a context for copying a parameter to the device; later work can use it."""
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
        self._follows = False

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Copy a parameter to the device during the previous update, when a slot is free."""
        computing = torch.cuda.current_stream(self._device)
        if not self._follows:  # wait for gradients and parameters on the device
            self._to_device.wait_stream(computing)
            self._follows = True
        if len(self._held) == IN_FLIGHT - 1:
            left, _ = self._held.popleft()
            left.synchronize()
        with torch.cuda.stream(self._to_device):
            yield
        computing.wait_stream(self._to_device)

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
        self._follows = False


def copy_streams(device: torch.device | None) -> InOrder:
    """Return the ordering of copies for a device; None means parameters stay in place."""
    return CopyStreams(device) if device is not None and device.type == "cuda" else InOrder()
