"""Ends a run if its loss, gradients or parameters are not finite, and names the first culprit.

The checks run at logged steps, at which the loss is read anyway, and before a checkpoint is saved.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from axonlaunch.checkpoint.loading.reader import any_rank
from axonlaunch.comm import World
from axonlaunch.comm.checks.json_exchange import all_gather_json
from axonlaunch.comm.mesh import local_part
from axonlaunch.engines.engine import Engine

LEAST_LOSS_SCALE = 1e-4
"""Smallest fp16 loss scale; equal to fairseq's ``min_loss_scale``. Each overflow halves the scale.
In a run that trains, the scale is much larger."""


class NotFiniteError(ArithmeticError):
    """The loss, a gradient or a parameter is infinite or NaN."""


def raise_if_nonfinite(
    engine: Engine, loss: Tensor, *, world: World, checks_gradients: bool = True
) -> Tensor | None:
    """Check loss and gradient norm. Every rank calls this after ``backward``, before the update.

    Args:
        engine: Engine whose parameters have gradients.
        loss: Loss of the step, the same on every rank.
        world: The ranks that train.
        checks_gradients: Whether to check the gradient norm. It is False for fp16, which skips
            updates with gradients that are not finite, and if backward has used the gradients.

    Returns:
        The norm of the gradient, or None if it was not checked.

    Raises:
        NotFiniteError: The loss or the gradient norm is not finite. The message names the first
            parameter that is not finite, otherwise the first with a gradient that is not finite.
    """
    value = float(loss)
    if not math.isfinite(value):
        _refuse(f"the loss of step {engine.step + 1} is {value:g}", engine, world)
    # Only backward may divide by zero, after which clipping would make every parameter NaN. All
    # ranks vote, because replicas that do not average gradients have different norms.
    if not checks_gradients:
        return None
    norm = engine.gradient_norm()
    if any_rank(not _is_finite(norm), world=world):
        _refuse(f"the norm of the gradient of step {engine.step + 1} is not finite", engine, world)
    return norm


def raise_if_nonfinite_parameters(engine: Engine, *, world: World) -> None:
    """Check the parameters before they are saved. Every rank calls this after an update.

    Raises:
        NotFiniteError: A parameter is not finite. The message names the first one.
    """
    is_finite = all(_is_finite(p.detach()) for _, p in engine.named_parameters())
    if any_rank(not is_finite, world=world):
        _refuse(f"after step {engine.step} parameters are not finite", engine, world)


def raise_if_scale_is_exhausted(engine: Engine) -> None:
    """Check that the fp16 loss scale is not exhausted by a series of skipped updates.

    Raises:
        NotFiniteError: The loss scale is below ``LEAST_LOSS_SCALE``.
    """
    if (scale := engine.loss_scale) < LEAST_LOSS_SCALE:
        raise NotFiniteError(
            f"gradients overflow fp16 in step {engine.step} and in steps before it: updates were "
            f"skipped until the loss scale was {scale:g}, below the minimum of "
            f"{LEAST_LOSS_SCALE:g}; use train.precision=bf16, which has the range of fp32"
        )


def _refuse(message: str, engine: Engine, world: World) -> NoReturn:
    firsts: list[Any] = [_first(engine, world.rank)]
    if world.world_size > 1:
        firsts = all_gather_json(firsts[0])
    if culprits := sorted(first for first in firsts if first is not None):
        raise NotFiniteError(f"{message}; {culprits[0][-1]}")
    raise NotFiniteError(f"{message}; every parameter and every gradient is finite")


def _first(engine: Engine, rank: int) -> tuple[int, int, int, str] | None:
    """Return a sort key and a description of the first tensor on this rank that is not finite.

    Parameters come before gradients, then lower ranks (which have earlier pipeline stages).
    """
    parameters, updated = list(engine.named_parameters()), engine.named_updated()
    kinds = (
        ("that is not finite", [(name, parameter.detach()) for name, parameter in parameters]),
        ("whose gradient is not finite", [(n, t.grad) for n, t in updated if t.grad is not None]),
    )
    for kind, (description, tensors) in enumerate(kinds):
        wrong = [(i, name) for i, (name, tensor) in enumerate(tensors) if not _is_finite(tensor)]
        if wrong:
            index, name = wrong[0]
            count = f"{len(wrong)} of {len(tensors)} on its rank"
            return kind, rank, index, f"{name} is the first parameter {description} ({count})"
    return None


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local_part(tensor)).all())
