"""Random numbers of training, dropout's masks above all: who draws alike, and when again.

No two layouts draw for the same elements, so numbers are compared without dropout. What a model
draws with it is recorded here as it is drawn, in steps of its own. In a model that draws nothing a
number is drawn inside a block's forward: what holds of it would hold of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch.config import RunConfig
from axonlaunch.config.axes import AXES, REPLICATE, SHARD
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.models.spec import ModelSpec

_FEWEST = 16
"""Elements that a mask drops and keeps at least; others are alike by chance."""
_MASKS = {
    torch.ops.aten.bernoulli_.float: lambda result: result,
    torch.ops.aten.bernoulli.default: lambda result: result,
    torch.ops.aten.bernoulli.p: lambda result: result,
    torch.ops.aten.native_dropout.default: lambda result: result[1],
}
"""What draws a mask, and where it is in the result."""


@dataclass(frozen=True)
class Draw:
    """What a rank drew.

    Attributes:
        step: From 1.
        module: Inside of which.
        value: Equal for what is equal; empty for a mask too small to compare.
        rank: Whose.
        is_again: Whether it was drawn outside of a forward, in backward: recomputing.
    """

    step: int
    module: str
    value: str
    rank: int
    is_again: bool = False


class DrawProbe:
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
                self.draws.append(
                    Draw(
                        self.step,
                        name,
                        repr(float(torch.rand((), dtype=torch.float64))),
                        self._rank,
                    )
                )

        return record


class MaskRecorder(TorchDispatchMode):
    """Records the masks that are drawn while it is entered, in this thread."""

    def __init__(self, modules: Sequence[nn.Module], *, rank: int) -> None:
        """Follow which module computes.

        Args:
            modules: What a rank holds of the model.
            rank: Whose.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self.step = 0
        self._rank = rank
        self._computing: list[str] = []
        self._forwards = 0
        for root in modules:
            for name, part in root.named_modules():
                part.register_forward_pre_hook(self._entering(name))
                part.register_forward_hook(self._leaving(name), always_call=True)

    def _entering(self, name: str) -> Any:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            self._computing.append(name)
            self._forwards += not name

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            self._computing.pop()
            self._forwards -= not name

        return leave

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        result = func(*args, **(kwargs or {}))
        if func in _MASKS and torch.is_grad_enabled():
            self._note(_MASKS[func](result))
        return result

    def _note(self, mask: Tensor) -> None:
        drawn = mask.detach().cpu() != 0
        digest = ""
        if min(int(drawn.sum()), drawn.numel() - int(drawn.sum())) >= _FEWEST:
            digest = blake2b(drawn.numpy().tobytes(), digest_size=16).hexdigest()
        module = self._computing[-1] if self._computing else ""
        self.draws.append(Draw(self.step, module, digest, self._rank, is_again=not self._forwards))


def _first_leaf(block: nn.Module) -> tuple[str, nn.Module]:
    """Return the first module that has none inside, and parameters: it is surely called."""
    for name, part in block.named_modules():
        if next(part.parameters(), None) is not None and not any(part.children()):
            return name, part
    return "", block


def draw_problems(
    config: RunConfig, draws: Sequence[Draw], *, steps: int, has_dropout: bool
) -> Iterator[str]:
    """Yield what is wrong with what all ranks drew.

    Args:
        config: The layout's.
        draws: Of all ranks.
        steps: In which they were recorded.
        has_dropout: Whether they are the model's own masks; a block that draws none need not draw
            again.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    yield from _missing(draws, steps)
    draws = [draw for draw in draws if draw.value]
    by_place: dict[tuple[int, str, int], list[str]] = {}
    for draw in draws:
        if not draw.is_again:
            by_place.setdefault((draw.step, draw.module, draw.rank), []).append(draw.value)
    if has_dropout:
        yield from _recomputed_draws(draws)
    yield from _between_steps(by_place)
    for (step, module, rank), values in by_place.items():
        if has_dropout and len(set(values)) < len(values):
            yield (
                f"step {step}: rank {rank} draws the same random numbers in {module} for two "
                "micro-batches: dropout would repeat its masks"
            )
    yield from _between_ranks(layout, by_place)
    yield from _between_stages(layout, by_place)


def _missing(draws: Sequence[Draw], steps: int) -> Iterator[str]:
    """Yield the steps in which a rank that draws in others draws nothing."""
    drawn = {(draw.step, draw.rank) for draw in draws if not draw.is_again}
    for rank in sorted({rank for _, rank in drawn}):
        for step in range(1, steps + 1):
            if (step, rank) not in drawn:
                yield (
                    f"step {step}: rank {rank} draws no random numbers, as it does in other steps: "
                    "its model is not in training mode"
                )


def _recomputed_draws(draws: Sequence[Draw]) -> Iterator[str]:
    drawn = {(draw.step, draw.rank, draw.value) for draw in draws if not draw.is_again}
    for draw in draws:
        if draw.is_again and (draw.step, draw.rank, draw.value) not in drawn:
            yield (
                f"step {draw.step}: recomputing {draw.module} on rank {draw.rank} draws other "
                "random numbers than its forward did: dropout masks otherwise"
            )


def _between_steps(by_place: dict[tuple[int, str, int], list[str]]) -> Iterator[str]:
    """Yield what any rank has drawn in an earlier step: seeds of steps and ranks may meet."""
    first_places: dict[tuple[str, str], tuple[int, int]] = {}
    for (step, module, rank), values in sorted(by_place.items()):
        places = {first_places.setdefault((module, value), (step, rank)) for value in values}
        for earlier, other in sorted(places):
            if earlier < step:
                yield (
                    f"step {step}: rank {rank} draws the same random numbers in {module} as rank "
                    f"{other} in step {earlier}: dropout would repeat its masks"
                )


def _between_ranks(
    layout: Layout, by_place: dict[tuple[int, str, int], list[str]]
) -> Iterator[str]:
    draw_alike = {axis.name: axis.word for axis in AXES if axis.draws_alike}
    of_positions = {axis.name: axis.word for axis in AXES if axis.divides == "sequences"}
    for (step, module, rank), values in by_place.items():
        for other in range(rank):
            theirs = by_place.get((step, module, other))
            if theirs is None:
                continue
            here, there = layout.coordinates(rank), layout.coordinates(other)
            apart = {axis for axis in here if here[axis] != there[axis]}
            if len(apart) == 1 and apart <= draw_alike.keys() and values != theirs:
                [axis] = apart
                yield (
                    f"step {step}: ranks {other} and {rank} of a {draw_alike[axis]} axis draw "
                    f"different random numbers in {module}, where they hold the same values"
                )
            if apart & {REPLICATE, SHARD} and set(values) & set(theirs):
                yield (
                    f"step {step}: data ranks {other} and {rank} draw the same random numbers in "
                    f"{module}: dropout would mask their samples alike"
                )
            if len(apart) == 1 and apart <= of_positions.keys() and set(values) & set(theirs):
                [axis] = apart
                yield (
                    f"step {step}: ranks {other} and {rank} of a {of_positions[axis]} axis draw "
                    f"the same random numbers in {module}: dropout would mask other positions alike"
                )


def _between_stages(
    layout: Layout, by_place: dict[tuple[int, str, int], list[str]]
) -> Iterator[str]:
    """Yield the stages of one pipeline that draw alike, as no two blocks of one process do."""
    of_rank: dict[tuple[int, int], set[str]] = {}
    for (step, _, rank), values in by_place.items():
        of_rank.setdefault((step, rank), set()).update(values)
    for (step, rank), drawn in of_rank.items():
        here = layout.coordinates(rank)
        for other in range(rank):
            there = layout.coordinates(other)
            is_behind = {axis for axis in here if here[axis] != there[axis]} == {"pp"}
            if is_behind and drawn & of_rank.get((step, other), set()):
                yield (
                    f"step {step}: ranks {other} and {rank} of a pipeline draw the same random "
                    "numbers: dropout would mask their blocks alike"
                )
