"""The norm of a full model's gradient, and gradient clipping."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.comm.mesh import local_part

_ROW = 4096
"""Number of elements whose squares a CPU sums sequentially."""


def clip_gradients(parameters: Iterable[Tensor], *, max_norm: float | None) -> Tensor:
    """Scale gradients so that the full model's 2-norm is at most ``max_norm``.

    Args:
        parameters: Parameters with the gradients to scale: plain tensors, or DTensors of any mesh.
        max_norm: Maximum norm; None does not clip.

    Returns:
        The norm before clipping, 0-dim fp32, the same on every rank.
    """
    parameters = list(parameters)
    norm, factor = clipping_factor(gradient_norm(parameters), max_norm=max_norm)
    scale_gradients(parameters, factor)
    return norm


def clipping_factor(
    norm: Tensor, *, max_norm: float | None, loss_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the norm without the loss scale, and the factor of the gradients; None for 1.

    Args:
        norm: Norm of the full model's gradient.
        max_norm: Maximum norm; None does not clip.
        loss_scale: Factor by which gradients are too large, 0-dim; None for 1. It is a power of
            two, so dividing by it together with clipping, in one pass, gives the same bits as
            before it.
    """
    if loss_scale is not None:
        norm = norm / loss_scale
    factor = None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if loss_scale is not None:
        factor = (1.0 if factor is None else factor) / loss_scale
    return norm, factor


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor | None) -> None:
    """Multiply gradients by a factor, in place and in their type; None changes nothing."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if factor is not None and gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def scales_gradients(optimizer: Optimizer) -> bool:
    """Return whether steps apply ``grad_scale`` and ``found_inf``, as those of fused kernels do.

    ``grad_scale`` divides the gradients, and ``found_inf`` skips a step if it is 1. Both are
    attributes that ``torch.amp.GradScaler`` sets before a step: 0-dim, fp32. Classes with a step of
    their own may ignore them.
    """
    supported: bool = getattr(optimizer, "_step_supports_amp_scaling", False)
    kind: Any = type(optimizer)
    return supported and _steps_as_in_torch(kind)


@functools.cache
def _steps_as_in_torch(kind: Any) -> bool:
    """Return whether a class of optimizers has a step of torch with fused kernels."""
    fused = (optim.Adam, optim.SGD, optim.Adagrad)
    return inspect.unwrap(kind.step) in {inspect.unwrap(each.step) for each in fused}


def gradient_norm(
    parameters: Iterable[Tensor],
    *,
    across: ProcessGroup | None = None,
    computed: Mapping[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the 2-norm of all gradients together, 0-dim fp32, the same on every rank.

    Squares are summed locally and then over each mesh axis that shards them. torch's
    ``get_total_norm`` does not support gradients on different meshes.

    Args:
        parameters: Parameters whose gradients are included. A parameter that several ranks of
            ``across`` hold must be included on only one of them.
        across: Ranks that hold other parameters of the model, such as pipeline stages.
        computed: Norms of this rank's parts of gradients in host memory, by parameter, where
            they are computed already.
    """
    alike: dict[tuple[DeviceMesh | None, tuple[int, ...]], dict[Tensor, Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            alike.setdefault(_division(gradient), {})[parameter] = local_part(gradient)
    total: Tensor | None = None
    for (mesh, axes), gradients in alike.items():
        norms = torch.stack(_norms(gradients, computed or {})).float()
        square = torch.linalg.vector_norm(norms).square()
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(axis))
        total = square if total is None else total.to(square.device) + square
    if total is None:
        total = torch.zeros(())
    if across is not None and across.size > 1:
        total = total.to(device_of(across))
        dist.all_reduce(total, group=across.torch_group)
    return total.sqrt()


def _norms(by_parameter: dict[Tensor, Tensor], computed: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Return the 2-norm of each parameter's gradient."""
    gradients = [*by_parameter.values()]
    if gradients[0].device.type != "cpu":
        # In their type, the norm of fp16 gradients would overflow.
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        return list(torch._foreach_norm(gradients, 2, dtype))
    return [
        norm_on_host(gradient) if (norm := computed.get(parameter)) is None else norm
        for parameter, gradient in by_parameter.items()
    ]


def norm_on_host(gradient: Tensor) -> Tensor:
    """Return the 2-norm of a tensor on a CPU in two levels: of rows, then of their norms.

    The rows are computed on all cores. For a single vector, torch sums all squares in fp32 on one
    core, and such a large sum loses most of each new term: the norm of 2^26 random elements is 0.5
    % too small, of 2^29 10 %.
    """
    flat, dtype = gradient.reshape(-1), torch.promote_types(gradient.dtype, torch.float32)
    filled = flat.numel() // _ROW * _ROW
    rest: Tensor = torch.linalg.vector_norm(flat[filled:], dtype=dtype)
    if not filled:
        return rest
    rows = torch.linalg.vector_norm(flat[:filled].view(-1, _ROW), dim=1, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]))
    return norm


def _division(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return a gradient's mesh and the mesh axes that shard the gradient."""
    if not isinstance(gradient, DTensor):
        return None, ()
    mesh = gradient.device_mesh
    divided = enumerate(gradient.placements)
    axes = [a for a, p in divided if not p.is_replicate() and mesh.size(a) > 1]
    return mesh, tuple(axes)
