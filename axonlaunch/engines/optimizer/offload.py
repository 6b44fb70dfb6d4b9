"""Updates with parameters or optimizer states in host memory between steps.

Parameters pass through the device one after another, so the device holds states and copies of only
a few at a time. With a CPU device, host and device are the same and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from axonlaunch.config.optimization.optimizer import OptimizerConfig
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.engines.optimizer.streaming import stream_parameters

HOST = torch.device("cpu")


class StreamedUpdate(Update):
    """Runs the update on the device one parameter at a time, overlapped with copies.

    Exact for optimizers that update each parameter from only its own gradient and states.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device,
        states_on: torch.device,
        parameters: Mapping[str, ParameterFacts] | None = None,
        seed: int = 0,
    ) -> None:
        """Create the streaming optimizers.

        Args:
            config: Configuration of the optimizer.
            tensors: Shards by parameter name, on the host or on the device.
            device: Device of the update.
            states_on: Device of the states between updates.
            parameters: Facts about the parameters, see ``Update``.
            seed: Seed of random numbers, see ``Update``.
        """
        self._device = device
        self._states_on = states_on
        super().__init__(config, tensors, parameters=parameters, seed=seed)

    def _build(self) -> list[Optimizer]:
        optimizers = self._optimizers()
        for optimizer in optimizers:
            stream_parameters(
                optimizer,
                device=self._device,
                states_on=self._states_on,
                arithmetic=self._arithmetic,
            )
        return optimizers

    def _step_device(self, optimizer: Optimizer) -> torch.device:
        del optimizer
        return self._device

    def _states_device(self, tensor: Tensor) -> torch.device:
        del tensor
        return self._states_on
