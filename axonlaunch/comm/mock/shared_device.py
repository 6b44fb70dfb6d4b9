"""The device on which all ranks of a mock world compute: one CPU, or one GPU that they share.

On a GPU kernels of the ranks are in flight on streams of their own, torch's and the engines', when
a collective moves data between them. The device is waited for before and after, which is slow, and
right for any streams; it is a world to find errors in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future


class SharedDevice:
    """What ranks that share a device have to do beside computing on it.

    Attributes:
        device: Where they compute.
        generators: torch's random generators that a rank's draws may come from.
    """

    def __init__(self, device: torch.device) -> None:
        generators = [torch.default_generator]
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.init()
            generators.append(torch.cuda.default_generators[device.index])
        self.device = device
        self.generators = generators

    @property
    def is_cpu(self) -> bool:
        """Whether it is the host, for which nobody waits."""
        return self.device.type == "cpu"

    def enter(self) -> None:
        """Make it the current one of this thread: torch has one for each."""
        if not self.is_cpu:
            torch.accelerator.set_device_index(self.device.index)

    def wait(self) -> None:
        """Wait until all that was launched on it is done."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.device)

    def future(self) -> Future[Any]:
        """Return a future that may hold tensors on it."""
        return Future() if self.is_cpu else Future(devices=[self.device])

    def random_states(self) -> list[torch.Tensor]:
        """Return where each generator is."""
        return [generator.get_state() for generator in self.generators]

    def set_random_states(self, states: list[torch.Tensor]) -> None:
        """Put each generator where it was."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
