"""Updates whose parameters or optimizer states live in host memory between steps.

One parameter after another passes through the device, so that the device never holds more states
or copies than those of a few. On a CPU device host and device are one and nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from axonlaunch.config.optimizer import OptimizerConfig
from axonlaunch.config.optimizer_states import ParameterFacts
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.engines.optimizer.streaming import stream_parameters

HOST = torch.device("cpu")


class StreamedUpdate(Update):
    """Runs the update on the device, one parameter after another, copies beside it.

    It is exact for optimizers that update each parameter from its own gradient and states alone.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device,
        states_on: torch.device,
        parameters: Mapping[str, ParameterFacts] | None = None,
    ) -> None:
        """Prepare an optimizer that streams.

        Args:
            config: The optimizer's figures.
            tensors: Shards by parameter name, on the host or on the device.
            device: Where the update runs.
            states_on: Where states live between updates.
            parameters: As ``Update`` takes them.
        """
        self._device = device
        self._states_on = states_on
        super().__init__(config, tensors, parameters=parameters)

    def _build(self) -> list[Optimizer]:
        made = self._optimizers()
        for optimizer in made:
            stream_parameters(
                optimizer, device=self._device, states_on=self._states_on, dtype=self._dtype
            )
        return made

    def _states_device(self, tensor: Tensor) -> torch.device:
        del tensor
        return self._states_on
