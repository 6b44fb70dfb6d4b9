"""Updates each parameter in the backward, as soon as its gradient is complete.

A gradient is freed after the update, so the gradients of a step never exist at the same time. Torch
calls the hooks of a parameter when autograd has added up the gradients of all of its uses, and
``fully_shard`` calls those of a shard when it has reduced them. After that no other operation of
the backward reads the parameter; torch would report a changed tensor.

Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from axonlaunch.comm.mesh import local_part
from axonlaunch.config.optimization.optimizer import OptimizerConfig
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.engines.optimizer.step import Update


class UpdateInBackward(Update):
    """Runs the update of a step in its only backward.

    The results are those of ``Update``, for optimizers that update each parameter from only its own
    gradient and states.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Mapping[str, Tensor],
        *,
        parameters: Mapping[str, ParameterFacts] | None = None,
        seed: int = 0,
    ) -> None:
        """Create the optimizers and register their steps; takes the arguments of ``Update``."""
        super().__init__(config, tensors, parameters=parameters, seed=seed)
        groups: dict[Tensor, tuple[Optimizer, dict[str, Any]]] = {
            parameter: (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self._updated.items():
            optimizer, group = groups[parameter]
            step = partial(self._update_one, name, optimizer, group)
            self._call_when_complete(self.tensors[name], step)

    def _call_when_complete(self, tensor: Tensor, update_one: Callable[[Tensor], None]) -> None:
        """Call the update of a tensor when its gradient is complete."""
        tensor.register_post_accumulate_grad_hook(update_one)

    def begin_backward(self, *, rate: Callable[[float], float], step: int) -> None:
        """Prepare the updates of the next backward; takes the arguments of ``apply``."""
        self._begin_step(rate=rate, step=step)

    def apply(
        self, *, rate: Callable[[float], float], step: int = 1, skip: Tensor | None = None
    ) -> None:
        """Free gradients that no backward computed; all others have been used."""
        del rate, step
        assert skip is None, "an update in backward can't be skipped"
        self.forget_gradients()

    def _update_one(
        self, name: str, optimizer: Optimizer, group: dict[str, Any], tensor: Tensor
    ) -> None:
        """Update one parameter; torch passes the tensor that has the gradient."""
        parameter = self._updated[name]
        self._hand_over(name)
        if parameter.is_cuda:
            # FSDP calls this on a stream of its own. States of a checkpoint are from another one,
            # and an update may replace them before its kernels have read them.
            for state in optimizer.state.get(parameter, {}).values():
                if isinstance(state, Tensor) and state.is_cuda:
                    local_part(state).record_stream(torch.cuda.current_stream(state.device))
        groups = optimizer.param_groups
        try:
            optimizer.param_groups = [{**group, "params": [parameter]}]
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        tensor.grad = parameter.grad = None
