"""The optimizer's side of a step: gradient scaling and norm, the update, and the states' names.

It works on whatever tensors an engine updates, whole parameters or DTensor shards alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.argument_checks import device_of
from axonlaunch.config.optimizer import OptimizerConfig
from axonlaunch.engines.optimizer.optimizers import build_optimizer, new_states


class Update:
    """Updates parameters in place.

    Attributes:
        tensors: What is updated, by the parameter's fully-qualified name.
    """

    def __init__(self, config: OptimizerConfig, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._config = config
        self.optimizers = self._build(config)

    def _build(self, config: OptimizerConfig) -> list[Optimizer]:
        # A pipeline stage may hold nothing that is trained.
        return [build_optimizer(config, self.tensors.values())] if self.tensors else []

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
        gradients = [local_part(t.grad) for t in self.tensors.values() if t.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_gradients(
        self,
        max_norm: float | None,
        *,
        uncounted: Container[str] = (),
        across: ProcessGroup | None = None,
    ) -> Tensor:
        """Scale gradients down to a norm; return the whole model's norm before that, 0-dim.

        Args:
            max_norm: Largest norm; None scales nothing.
            uncounted: Names whose gradients another tensor's stand for in the norm.
            across: Ranks that hold other parameters of the model.
        """
        counted = [t for name, t in self.tensors.items() if name not in uncounted]
        return clip_gradients(
            self.tensors.values(), max_norm=max_norm, counted=counted, across=across
        )

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
        """Allocate the states that the first step would make, without a step."""
        for optimizer in self.optimizers:
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                if not optimizer.state.get(parameter):
                    device = self._states_device(parameter)
                    states = new_states(self._config, parameter, device=device)
                    optimizer.state[parameter] = states

    def _states_device(self, tensor: Tensor) -> torch.device:
        """Return where the states of a tensor are between updates."""
        return tensor.device


def clip_gradients(
    parameters: Iterable[Tensor],
    *,
    max_norm: float | None,
    counted: Iterable[Tensor] | None = None,
    across: ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients so that the whole model's 2-norm is at most ``max_norm``.

    Args:
        parameters: Those whose gradients are scaled: whole tensors, or DTensors of any meshes.
        max_norm: Largest norm; None scales nothing.
        counted: Those whose gradients make the norm; None: all. A parameter that another rank
            of ``across`` holds too counts on one of them.
        across: Ranks that hold other parameters of the model, as pipeline stages do.

    Returns:
        The norm before clipping, 0-dim fp32, the same on every rank.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters if counted is None else counted, across=across)
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if max_norm is not None and gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def gradient_norm(parameters: Iterable[Tensor], *, across: ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm of all gradients together, 0-dim fp32, the same on every rank.

    Squares are summed where gradients lie, then over each mesh axis that divides them; torch's
    ``get_total_norm`` refuses gradients of different meshes.
    """
    alike: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            alike.setdefault(_division(gradient), []).append(local_part(gradient))
    total = torch.zeros(())
    for (mesh, axes), gradients in alike.items():
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        square = torch.linalg.vector_norm(norms).square()
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(axis))
        total = total.to(square.device) + square
    if across is not None and across.size > 1:
        total = total.to(device_of(across))
        dist.all_reduce(total, group=across.torch_group)
    return total.sqrt()


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _division(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return a gradient's mesh and the axes of it that divide the gradient."""
    if not isinstance(gradient, DTensor):
        return None, ()
    mesh = gradient.device_mesh
    divided = enumerate(gradient.placements)
    axes = [a for a, p in divided if not p.is_replicate() and mesh.size(a) > 1]
    return mesh, tuple(axes)
