"""Checks which ranks and steps draw equal random numbers, in particular dropout masks.

Layouts draw different masks, so other quantities are compared without dropout. In models with
dropout, the masks of two additional steps are recorded. In other models a random number is drawn
inside a block's forward instead, which behaves as a mask would.
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
from axonlaunch.config.axes import AXES, DP_REPLICATE, DP_SHARD
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.models.specs.model_spec import ModelSpec

_MIN_ELEMENTS = 16
"""Least number of dropped and of kept elements; smaller masks can be equal by chance."""
_MASKS = {
    torch.ops.aten.bernoulli_.float: lambda result: result,
    torch.ops.aten.bernoulli.default: lambda result: result,
    torch.ops.aten.bernoulli.p: lambda result: result,
    torch.ops.aten.native_dropout.default: lambda result: result[1],
}
"""Operations that draw a mask, and functions that select it from their result."""


@dataclass(frozen=True)
class Draw:
    """A random draw of one rank.

    Attributes:
        step: Number of the step, from 1.
        module: Name of the innermost module that was running.
        value: Text that is equal for equal draws; empty for a mask that is too small to compare.
        rank: Global rank that drew.
        is_recomputed: Whether it was drawn in backward, by recomputation.
    """

    step: int
    module: str
    value: str
    rank: int
    is_recomputed: bool = False


class DrawProbe:
    """Draws a random number when the first block of each of a rank's modules starts a forward."""

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
    """Records the masks that this thread draws while the mode is active."""

    def __init__(self, modules: Sequence[nn.Module], *, rank: int) -> None:
        """Register hooks that track the running module.

        Args:
            modules: Models or pipeline stages of this rank.
            rank: Global rank.
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
        if min(int(drawn.sum()), drawn.numel() - int(drawn.sum())) >= _MIN_ELEMENTS:
            digest = blake2b(drawn.numpy().tobytes(), digest_size=16).hexdigest()
        module = self._computing[-1] if self._computing else ""
        self.draws.append(
            Draw(self.step, module, digest, self._rank, is_recomputed=not self._forwards)
        )


def _first_leaf(block: nn.Module) -> tuple[str, nn.Module]:
    """Return the first submodule with parameters and no children, which every forward calls."""
    for name, part in block.named_modules():
        if next(part.parameters(), None) is not None and not any(part.children()):
            return name, part
    return "", block


def draw_problems(
    config: RunConfig, draws: Sequence[Draw], *, steps: int, has_dropout: bool
) -> Iterator[str]:
    """Describe draws that are equal or different where they must not be.

    Args:
        config: Configuration of the layout.
        draws: Draws of all ranks.
        steps: Number of steps that were recorded.
        has_dropout: Whether the draws are dropout masks. If not, recomputation and micro-batches
            are not checked.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    yield from _missing(draws, steps)
    draws = [draw for draw in draws if draw.value]
    by_module: dict[tuple[int, str, int], list[str]] = {}
    for draw in draws:
        if not draw.is_recomputed:
            by_module.setdefault((draw.step, draw.module, draw.rank), []).append(draw.value)
    if has_dropout:
        yield from _recomputed_draws(draws)
    yield from _between_steps(by_module)
    for (step, module, rank), values in by_module.items():
        if has_dropout and len(set(values)) < len(values):
            yield (
                f"step {step}: rank {rank} draws the same random numbers in {module} for two "
                "micro-batches: dropout would repeat its masks"
            )
    yield from _between_ranks(layout, by_module)
    yield from _between_stages(layout, by_module)


def _missing(draws: Sequence[Draw], steps: int) -> Iterator[str]:
    """Describe steps in which a rank draws nothing although it draws in other steps."""
    drawn = {(draw.step, draw.rank) for draw in draws if not draw.is_recomputed}
    for rank in sorted({rank for _, rank in drawn}):
        for step in range(1, steps + 1):
            if (step, rank) not in drawn:
                yield (
                    f"step {step}: rank {rank} draws no random numbers, unlike in other steps: its "
                    "model is not in training mode"
                )


def _recomputed_draws(draws: Sequence[Draw]) -> Iterator[str]:
    drawn = {(draw.step, draw.rank, draw.value) for draw in draws if not draw.is_recomputed}
    for draw in draws:
        if draw.is_recomputed and (draw.step, draw.rank, draw.value) not in drawn:
            yield (
                f"step {draw.step}: recomputing {draw.module} on rank {draw.rank} draws random "
                "numbers that its forward did not draw: dropout would use different masks"
            )


def _between_steps(by_module: dict[tuple[int, str, int], list[str]]) -> Iterator[str]:
    """Describe draws equal to a draw of any rank in an earlier step, for example by equal seeds."""
    first_draws: dict[tuple[str, str], tuple[int, int]] = {}
    for (step, module, rank), values in sorted(by_module.items()):
        firsts = {first_draws.setdefault((module, value), (step, rank)) for value in values}
        for earlier, other in sorted(firsts):
            if earlier < step:
                yield (
                    f"step {step}: rank {rank} draws the same random numbers in {module} as rank "
                    f"{other} in step {earlier}: dropout would repeat its masks"
                )


def _between_ranks(
    layout: Layout, by_module: dict[tuple[int, str, int], list[str]]
) -> Iterator[str]:
    for (step, module, rank), values in by_module.items():
        for other in range(rank):
            other_values = by_module.get((step, module, other))
            if other_values is None:
                continue
            axes = _different_axes(layout, rank, other)
            for axis in AXES:
                if axes != {axis.name}:
                    continue
                if axis.same_outputs and values != other_values:
                    yield (
                        f"step {step}: ranks {other} and {rank} of a {axis.word} axis draw "
                        f"different random numbers in {module}, although they hold the same values"
                    )
                if axis.divides == "sequences" and set(values) & set(other_values):
                    yield (
                        f"step {step}: ranks {other} and {rank} of a {axis.word} axis draw the "
                        f"same random numbers in {module}: dropout would use the same mask for "
                        "different positions"
                    )
            if axes & {DP_REPLICATE, DP_SHARD} and set(values) & set(other_values):
                yield (
                    f"step {step}: data ranks {other} and {rank} draw the same random numbers in "
                    f"{module}: dropout would use the same mask for different samples"
                )


def _between_stages(
    layout: Layout, by_module: dict[tuple[int, str, int], list[str]]
) -> Iterator[str]:
    """Describe stages of a pipeline with equal draws; blocks of one process draw different ones."""
    by_rank: dict[tuple[int, int], set[str]] = {}
    for (step, _, rank), values in by_module.items():
        by_rank.setdefault((step, rank), set()).update(values)
    for (step, rank), drawn in by_rank.items():
        for other in range(rank):
            is_other_stage = _different_axes(layout, rank, other) == {"pp"}
            if is_other_stage and drawn & by_rank.get((step, other), set()):
                yield (
                    f"step {step}: ranks {other} and {rank} of a pipeline draw the same random "
                    "numbers: dropout would use the same masks in their blocks"
                )


def _different_axes(layout: Layout, rank: int, other: int) -> set[str]:
    """Return the mesh axes on which two ranks have different coordinates."""
    coordinates, others = layout.coordinates(rank), layout.coordinates(other)
    return {axis for axis in coordinates if coordinates[axis] != others[axis]}
