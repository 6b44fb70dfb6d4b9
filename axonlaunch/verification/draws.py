"""Random numbers of training, as dropout would draw them: who draws alike, and when again.

Dropout is off in what is compared, for no two layouts draw for the same elements. So a number is
drawn inside a block's forward and recorded; what holds of it holds of a mask drawn there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.models.build import spec_for
from axonlaunch.models.spec import ModelSpec


@dataclass(frozen=True)
class Draw:
    """A number that a rank drew.

    Attributes:
        step: From 1.
        module: Inside of which.
        value: Uniform in [0, 1).
        rank: Whose.
    """

    step: int
    module: str
    value: float
    rank: int


class DrawRecorder:
    """Draws a number where the first block of each module of a rank begins to compute."""

    def __init__(self, spec: ModelSpec, modules: Iterable[nn.Module], *, rank: int) -> None:
        self.draws: list[Draw] = []
        self.step = 0
        self._rank = rank
        for module in modules:
            name, block = next(iter(spec.blocks(module).items()), ("", module))
            inner, leaf = _first_leaf(block)
            leaf.register_forward_pre_hook(self._recording(".".join(filter(None, (name, inner)))))

    def _recording(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any) -> None:
            del inputs
            if module.training and torch.is_grad_enabled():
                self.draws.append(Draw(self.step, name, float(torch.rand(())), self._rank))

        return record


def _first_leaf(block: nn.Module) -> tuple[str, nn.Module]:
    """Return the first module that has none inside, and parameters: it is surely called."""
    for name, part in block.named_modules():
        if next(part.parameters(), None) is not None and not any(part.children()):
            return name, part
    return "", block


def draw_problems(config: RunConfig, draws: Sequence[Draw], *, has_dropout: bool) -> Iterator[str]:
    """Yield what is wrong with the numbers that all ranks drew.

    Args:
        config: The layout's.
        draws: Of all ranks.
        has_dropout: Whether the model draws; a block that does not need not draw again.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    by_place: dict[tuple[int, str, int], list[float]] = {}
    for draw in draws:
        by_place.setdefault((draw.step, draw.module, draw.rank), []).append(draw.value)
    if has_dropout and config.train.activation_checkpointing != "none":
        for (step, module, rank), values in by_place.items():
            if any(values.count(value) < 2 for value in values):
                yield (
                    f"step {step}: recomputing {module} on rank {rank} draws other random numbers "
                    "than its forward did: dropout would mask otherwise"
                )
    steps = sorted({draw.step for draw in draws})
    for (step, module, rank), values in by_place.items():
        later = by_place.get((step + 1, module, rank), [])
        if step + 1 in steps and set(values) & set(later):
            yield (
                f"step {step + 1}: rank {rank} draws the same random numbers in {module} as in the "
                "step before: dropout would repeat its masks"
            )
    yield from _between_ranks(layout, by_place)


def _between_ranks(
    layout: Layout, by_place: dict[tuple[int, str, int], list[float]]
) -> Iterator[str]:
    for (step, module, rank), values in by_place.items():
        for other in range(rank):
            theirs = by_place.get((step, module, other))
            if theirs is None:
                continue
            here, there = layout.coordinates(rank), layout.coordinates(other)
            apart = {axis for axis in here if here[axis] != there[axis]}
            if apart == {"tp"} and values != theirs:
                yield (
                    f"step {step}: ranks {other} and {rank} of a tensor axis draw different random "
                    f"numbers in {module}, where they hold the same values"
                )
            if apart & {"dp_replicate", "dp_shard"} and set(values) & set(theirs):
                yield (
                    f"step {step}: data ranks {other} and {rank} draw the same random numbers in "
                    f"{module}: dropout would mask their samples alike"
                )
            if apart == {"cp"} and set(values) & set(theirs):
                yield (
                    f"step {step}: ranks {other} and {rank} of a context axis draw the same random "
                    f"numbers in {module}: dropout would mask other positions alike"
                )


def recorder(config: RunConfig, modules: Iterable[nn.Module], *, rank: int) -> DrawRecorder | None:
    """Return what records a rank's draws; None where blocks are compiled, which draw otherwise."""
    if config.train.compile:
        return None
    return DrawRecorder(spec_for(config), modules, rank=rank)
