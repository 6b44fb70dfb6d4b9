"""A loss or gradient that is no number ends a run before it is learned from; it says where it is.

They are looked at where the loss is read anyway, at logged steps, and before a checkpoint is
written.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch.checkpoint.reader import any_rank
from axonlaunch.comm import World
from axonlaunch.comm.json_exchange import all_gather_json
from axonlaunch.engines.base import Engine

LEAST_LOSS_SCALE = 1e-4
"""fp16's loss scale is halved by each overflow; that of a run which trains is far above fairseq's
``min_loss_scale``, which this is."""


class NotFiniteError(ArithmeticError):
    """The loss, a gradient or a parameter is infinite or no number."""


def raise_if_nonfinite(
    engine: Engine, loss: Tensor, *, world: World, checks_gradients: bool = True
) -> Tensor | None:
    """Refuse to learn from what is not finite; every rank calls this after ``backward``.

    Args:
        engine: It has gradients.
        loss: The same on every rank.
        world: Who takes part.
        checks_gradients: Whether a gradient counts: fp16 leaves out updates by those.

    Returns:
        The norm of the gradient, where it was looked at.

    Raises:
        NotFiniteError: The loss is not finite, or the norm of the gradient; it names the first
            parameter that is not, else the first whose gradient is not.
    """
    value = float(loss)
    if not math.isfinite(value):
        _refuse(f"the loss of step {engine.step + 1} is {value:g}", engine, world)
    # It may be backward alone that divides by zero, and clipping then ruins every parameter.
    # Replicas need not average their gradients, so that each has a norm of its own.
    if not checks_gradients:
        return None
    norm = engine.gradient_norm()
    if any_rank(not _is_finite(norm), world=world):
        _refuse(f"the norm of the gradient of step {engine.step + 1} is not finite", engine, world)
    return norm


def raise_if_nonfinite_parameters(engine: Engine, *, world: World) -> None:
    """Refuse to save parameters that are not finite; every rank calls this after an update.

    Raises:
        NotFiniteError: A parameter is not finite; it names the first.
    """
    is_finite = all(_is_finite(p.detach()) for _, p in engine.named_parameters())
    if any_rank(not is_finite, world=world):
        _refuse(f"after step {engine.step} parameters are not finite", engine, world)


def raise_if_scale_is_exhausted(engine: Engine) -> None:
    """Refuse to continue where fp16 has left out one update after another; it reads the scale.

    Raises:
        NotFiniteError: The loss scale is below ``LEAST_LOSS_SCALE``.
    """
    if (scale := engine.loss_scale) < LEAST_LOSS_SCALE:
        raise NotFiniteError(
            f"gradients overflow fp16 in step {engine.step} and before it, so that updates were "
            f"left out until the loss scale was {scale:g}, which may be no less than "
            f"{LEAST_LOSS_SCALE:g}; train.precision=bf16 has the range of fp32"
        )


def _refuse(message: str, engine: Engine, world: World) -> NoReturn:
    firsts: list[Any] = [_first(engine, world.rank)]
    if world.world_size > 1:
        firsts = all_gather_json(firsts[0])
    if places := sorted(first for first in firsts if first is not None):
        raise NotFiniteError(f"{message}; {places[0][-1]}")
    raise NotFiniteError(f"{message}; every parameter and every gradient is finite")


def _first(engine: Engine, rank: int) -> tuple[int, int, int, str] | None:
    """Return how early this rank's first culprit comes, and the culprit in words.

    A parameter comes before a gradient; lower ranks have earlier stages of a pipeline.
    """
    named, updated = list(engine.named_parameters()), engine.named_updated()
    kinds = (
        ("that is not finite", [(name, parameter.detach()) for name, parameter in named]),
        ("whose gradient is not finite", [(n, t.grad) for n, t in updated if t.grad is not None]),
    )
    for kind, (description, tensors) in enumerate(kinds):
        wrong = [(i, name) for i, (name, tensor) in enumerate(tensors) if not _is_finite(tensor)]
        if wrong:
            index, name = wrong[0]
            of = f"{len(wrong)} of {len(tensors)} on its rank"
            return kind, rank, index, f"{name} is the first parameter {description} ({of})"
    return None


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())
