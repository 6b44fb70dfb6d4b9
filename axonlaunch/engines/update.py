"""The optimizer's side of a step: gradient scaling and norm, the update, and the states' names.

It works on whatever tensors an engine updates, whole parameters or DTensor shards alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from axonlaunch.config.optimizer import OptimizerConfig
from axonlaunch.engines.optimizer import build_optimizer


class Update:
    """Updates parameters in place.

    Attributes:
        tensors: What is updated, by the parameter's fully-qualified name.
    """

    def __init__(self, config: OptimizerConfig, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.optimizers = self._build(config)

    def _build(self, config: OptimizerConfig) -> list[Optimizer]:
        return [build_optimizer(config, self.tensors.values())]

    def collect_gradients(self) -> None:
        """Bring gradients to where the update reads them; whole parameters have them already."""

    def apply(self, *, learning_rate: float) -> None:
        """Update every tensor and forget the gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        self._step()
        self.forget_gradients()

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def forget_gradients(self) -> None:
        """Free every gradient."""
        for tensor in self.tensors.values():
            tensor.grad = None

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by a number."""
        torch._foreach_mul_(self._gradients(), factor)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Scale gradients down to a norm; return the whole model's norm before that, 0-dim."""
        return clip_gradients(self.tensors.values(), max_norm=max_norm)

    def _gradients(self) -> list[Tensor]:
        return [t.grad for t in self.tensors.values() if t.grad is not None]

    def state_dict(self) -> dict[str, Tensor]:
        """Return optimizer states as ``{"<parameter>.<state>": tensor}``, made if not there yet."""
        self._make_states()
        states = self._states()
        return {
            f"{name}.{key}": value
            for name, tensor in self.tensors.items()
            for key, value in states.get(tensor, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy optimizer states in.

        Raises:
            KeyError: A state of one of the tensors is missing.
        """
        for key, value in self.state_dict().items():
            if value is not state[key]:
                value.copy_(state[key])

    def _states(self) -> dict[Tensor, dict[str, Any]]:
        return {p: s for optimizer in self.optimizers for p, s in optimizer.state.items()}

    def _make_states(self) -> None:
        """Let each optimizer allocate its states by an update that changes nothing."""
        states = self._states()
        missing = [t for t in self.tensors.values() if not states.get(t)]
        if not missing:
            return
        kept = {tensor: tensor.grad for tensor in self.tensors.values()}
        rates = [[g["lr"] for g in optimizer.param_groups] for optimizer in self.optimizers]
        for tensor in self.tensors.values():
            tensor.grad = torch.zeros_like(tensor) if tensor in set(missing) else None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        self._step()
        for tensor in missing:  # the step that allocated them is not one of the run's
            for key, value in self._states().get(tensor, {}).items():
                if key == "step":
                    value.zero_()
        for optimizer, kept_rates in zip(self.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, kept_rates, strict=True):
                group["lr"] = rate
        for tensor, gradient in kept.items():
            tensor.grad = gradient


def clip_gradients(parameters: Iterable[Tensor], *, max_norm: float | None) -> Tensor:
    """Scale gradients so that their common 2-norm is at most ``max_norm``.

    Gradients are whole tensors or DTensors of one mesh.

    Returns:
        The norm before clipping, 0-dim, the same on every rank.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    whole = norm
    if isinstance(norm, DTensor):
        whole = norm.full_tensor()
        mesh = norm.device_mesh
        norm = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if max_norm is not None and gradients:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return whole
