"""The device on which all ranks of a mock world compute: a CPU, or a GPU that they share.

On a GPU, kernels of the ranks may be running on several streams of torch and the engines when a
collective moves data. So the device is synchronized before and after each collective. This is slow
but correct for any streams; the mock world is for finding errors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future


class SharedDevice:
    """Operations that ranks on a shared device need in addition to computing.

    Attributes:
        device: Device of all ranks.
        generators: torch's random generators that ranks may use.
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
        """Whether the device is the CPU, which needs no synchronization."""
        return self.device.type == "cpu"

    def enter(self) -> None:
        """Make the device the current one of this thread."""
        if not self.is_cpu:
            torch.accelerator.set_device_index(self.device.index)

    def wait(self) -> None:
        """Wait until all kernels on the device have finished."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.device)

    def future(self) -> Future[Any]:
        """Return a future that may hold tensors on the device."""
        return Future() if self.is_cpu else Future(devices=[self.device])

    def random_states(self) -> list[torch.Tensor]:
        """Return the state of each generator."""
        return [generator.get_state() for generator in self.generators]

    def set_random_states(self, states: list[torch.Tensor]) -> None:
        """Set the state of each generator."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
