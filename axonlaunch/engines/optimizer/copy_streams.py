"""Streams of a GPU by which one parameter arrives while another is updated and a third leaves.

It orders copies and computation, and holds what they use; what is copied is ``streaming``'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

IN_FLIGHT = 3
"""Parameters that may be on the device at a time: arriving, updated, leaving. Without a limit the
host, which waits for none of it, would bring them all.
"""


class InOrder:
    """One thing after another, as on a CPU."""

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Surround what brings a parameter; what follows outside of it finds it there."""
        yield

    @contextmanager
    def leaving(self, *held: object) -> Iterator[None]:
        """Surround what takes a parameter back, after what was launched before it.

        Args:
            held: What must not be freed before that is done.
        """
        del held
        yield

    def finish(self) -> None:
        """Wait until all that left is there: whoever reads it on the host does not."""


class CopyStreams(InOrder):
    """Copies in both directions at a time, beside what the current stream computes.

    Both directions of PCIe carry at once, and a copy takes none of the multiprocessors. What
    ``leaving`` holds is freed by the host once its copies are done, so the allocator, which knows
    of one stream for each block of memory, gives it to nobody too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_device, self._to_host = (torch.cuda.Stream(device) for _ in range(2))
        self._held: deque[tuple[torch.cuda.Event, tuple[object, ...]]] = deque()
        self._follows = False

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Bring a parameter once there is room, beside the update of the one before."""
        computing = torch.cuda.current_stream(self._device)
        if not self._follows:  # gradients, and parameters of the device, are computed before it
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
        """Take a parameter back, beside the update of the next one."""
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            yield
        self._held.append((self._to_host.record_event(), held))

    def finish(self) -> None:
        """Wait for what leaves; what is launched later comes after it."""
        self._to_host.synchronize()
        self._held.clear()
        self._follows = False


def copy_streams(device: torch.device | None) -> InOrder:
    """Return how what streams through a device is ordered; None: it stays where it is."""
    return CopyStreams(device) if device is not None and device.type == "cuda" else InOrder()
