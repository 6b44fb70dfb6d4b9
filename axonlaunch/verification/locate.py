"""Where a layout begins to compute something else than one process: the first module, by its name.

Outputs are compared by their root mean square over all ranks, which no division of samples,
positions or features changes; where they agree, gradients are compared from the loss backwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.layout import num_ranks
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.models.dtensor_regions import whole
from axonlaunch.verification.layout_run import prepared_engine

_TOLERANCE = 1e-4
"""Of a root mean square: far more than rounding, for what differs here differs in earnest."""
Sizes = dict[str, tuple[float, int]]
"""By a module's name, in the order of calls: the sum of its outputs' squares, and their number."""


def first_difference(config: RunConfig) -> str:
    """Return the first module whose outputs, or the last whose gradients, are not one process's.

    Args:
        config: Checked, small enough to be run on the mock world twice.
    """
    alone = {
        "strategy": StrategyConfig(data_parallel="none"),
        "launch.nproc": 1,
        "train.loss_chunk": None,
    }
    [(expected, gradients)] = World.mock(1).run(
        lambda world: _run(with_values(config, alone), world)
    )
    ranks = World.mock(num_ranks(config)).run(lambda world: _run(config, world))
    outputs: Sizes = {}
    for found, _ in ranks:
        for name, (squares, count) in found.items():
            before = outputs.get(name, (0.0, 0))
            outputs[name] = (before[0] + squares, before[1] + count)
    for name, size in expected.items():
        if name in outputs and not _alike(_mean(*outputs[name]), _mean(*size)):
            return name
    for name in reversed(gradients):
        seen = [found[name] for _, found in ranks if name in found]
        if not seen or not all(_alike(one, gradients[name]) for one in seen):
            return name.rpartition(".")[0] or name
    return ""


def _run(config: RunConfig, world: World) -> tuple[Sizes, dict[str, float]]:
    """Run forward and backward of a step; return the sizes of outputs and of gradients."""
    engine, loader = prepared_engine(config, world)
    sizes: Sizes = {}
    for module in engine.modules:
        for name, part in module.named_modules():
            part.register_forward_hook(_noting(sizes, _plain(name)))
    engine.backward(loader.batch(0))
    norms = {
        name: float(whole(parameter.grad).double().norm())
        for name, parameter in engine.named_parameters()
        if parameter.grad is not None
    }
    return {name: size for name, size in sizes.items() if name}, norms


def _noting(sizes: Sizes, name: str) -> Any:
    def note(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return  # shapes are tried out
        for tensor in _floating(outputs):
            squares, count = sizes.pop(name, (0.0, 0))
            local = tensor.detach()
            sizes[name] = (squares + float(local.double().square().sum()), count + local.numel())

    return note


def _floating(outputs: Any) -> Iterable[Tensor]:
    """Return the first tensor of numbers that a module returns."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return [one for one in parts if isinstance(one, Tensor) and one.is_floating_point()][:1]


def _plain(name: str) -> str:
    """Return a module's name without those of what wraps it."""
    return ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")


def _mean(squares: float, count: int) -> float:
    return math.sqrt(squares / max(1, count))


def _alike(seen: float, expected: float) -> bool:
    return abs(seen - expected) <= _TOLERANCE * max(abs(expected), 1e-8)
