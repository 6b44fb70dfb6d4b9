"""A loss that is no number ends a run before it is learned from, and says where it shows first.

It is held where the loss is read anyway, at logged steps, and before a checkpoint is written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch.comm import World
from axonlaunch.comm.json_exchange import all_gather_json
from axonlaunch.engines.base import Engine


class NotFiniteError(ArithmeticError):
    """The loss is infinite or no number."""


def raise_if_nonfinite(engine: Engine, loss: Tensor, *, world: World) -> None:
    """Refuse to continue from a loss that is not finite; every rank calls this after ``backward``.

    Args:
        engine: It has gradients.
        loss: The same on every rank.
        world: Who takes part.

    Raises:
        NotFiniteError: The loss is not finite; it names the first parameter that is not, else the
            first whose gradient is not.
    """
    value = float(loss)
    if math.isfinite(value):
        return
    firsts: list[Any] = [_first(engine, world.rank)]
    if world.world_size > 1:
        firsts = all_gather_json(firsts[0])
    message = f"the loss of step {engine.step + 1} is {value:g}; "
    if places := sorted(first for first in firsts if first is not None):
        message += places[0][-1]
    else:
        message += "every parameter and every gradient is finite"
    raise NotFiniteError(message)


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
