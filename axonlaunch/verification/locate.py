"""Where a layout begins to compute something else than one process: the first module, by its name.

Outputs of modules are compared in order of computation, each rank's with its part of what the plain
model gives; where they agree, gradients of parameters are, from the loss backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.verification import inputs
from axonlaunch.verification.differences import Difference, of_tensor, simple_ratio
from axonlaunch.verification.layout_run import prepared_engine
from axonlaunch.verification.plain_model import threads_for
from axonlaunch.verification.plan import ComparisonPlan
from axonlaunch.verification.reference import PlainRun
from axonlaunch.verification.result import tolerance_of
from axonlaunch.verification.tolerances import GRADIENT_FLOOR, root_mean_square

_TIMES = 10.0
"""Of the base tolerance: far more than rounding, for what differs here differs in earnest."""


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs part.

    Attributes:
        module: Its name; of the whole model it is empty.
        what: What differs, where, and by which factor if it is one.
    """

    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.what}"


@dataclass
class _Recorded:
    """What the modules of one side gave in the first step, and its gradients.

    Attributes:
        outputs: By a module's name in order of calls: a tensor for each micro-batch.
        gradients: Of parameters.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def first_difference(config: RunConfig) -> FirstDifference | None:
    """Return the first module whose outputs, or the last whose gradients, are not one process's.

    Args:
        config: Checked, small enough to be run on the mock world twice.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    with threads_for(config):
        expected = _plain(config)
        ranks = World.mock(num_ranks(config)).run(lambda world: _compared(config, world, expected))
    passing = _TIMES * tolerance_of(config)
    for kind, names in (
        ("output", [*expected.outputs]),
        ("gradient", _backwards(expected)),
    ):
        for name in names:
            measured = [d for rank in ranks for d in rank if (d.kind, d.name) == (kind, name)]
            wrong = [d for d in measured if not d.relative <= passing]
            if wrong:
                module = name if kind == "output" else name.rpartition(".")[0] or name
                return FirstDifference(module, _what(kind, name, wrong, measured, layout))
    return None


def _backwards(expected: _Recorded) -> list[str]:
    """Return parameters in the order in which a backward reaches their modules."""
    order = {name: place for place, name in enumerate(expected.outputs)}
    return sorted(
        expected.gradients, key=lambda name: -order.get(name.rpartition(".")[0], len(order))
    )


def _what(
    kind: str,
    name: str,
    wrong: Sequence[Difference],
    measured: Sequence[Difference],
    layout: Layout,
) -> str:
    worst = max(wrong, key=lambda difference: difference.relative)
    of = "its output" if kind == "output" else f"the gradient of {name}"
    times = simple_ratio(worst)
    how = f"is off by {worst.relative:.2g} of its size"
    if times is not None:
        how = f"is {times} what it should be"
        for axis, size in layout.axes.items():
            if size > 1 and _near(worst.ratio, size):
                how += f", as if summed once too often over {axis}"
            elif size > 1 and _near(worst.ratio, 1 / size):
                how += f", as if not summed, or averaged twice, over {axis}"
    return f"{of} {how} {_where(wrong, measured, layout)}"


def _near(ratio: float | None, value: float) -> bool:
    return ratio is not None and abs(ratio - value) < 1e-2 * value


def _where(wrong: Sequence[Difference], measured: Sequence[Difference], layout: Layout) -> str:
    """Say on which ranks, and what they have in common that others have not."""
    here = sorted({difference.rank for difference in wrong})
    everyone = {difference.rank for difference in measured}
    if set(here) == everyone:
        return "on every rank that computes it"
    places = []
    for axis, size in layout.axes.items():
        seen = {layout.coordinates(rank)[axis] for rank in here}
        others = {layout.coordinates(rank)[axis] for rank in everyone}
        if size > 1 and len(seen) == 1 and seen != others:
            places.append(f"{axis} {seen.pop()}")
    common = f" ({', '.join(places)})" if places else ""
    return f"on rank {', '.join(map(str, here))}{common}"


def _plain(config: RunConfig) -> _Recorded:
    """Run the first step of the plain model."""
    with torch.random.fork_rng(devices=[]):
        run = PlainRun(config, ComparisonPlan(steps=1))
        recorded = _Recorded()
        _record(recorded, [run.model])
        recorded.gradients = run.step(0).gradients
    return recorded


def _compared(config: RunConfig, world: World, expected: _Recorded) -> list[Difference]:
    """Run the first step as a rank, and compare what its modules gave."""
    engine, loader = prepared_engine(config, world)
    layout = Layout.of(config, world_size=world.world_size)
    recorded = _Recorded()
    _record(recorded, engine.modules)
    batch = loader.batch(0)
    first = layout.data_shard(world.rank) * len(batch.inputs)
    engine.backward(inputs.uneven(batch, first_row=first, step=0))
    differences = []
    for name, calls in recorded.outputs.items():
        for number, seen in enumerate(calls[: layout.micro_batches]):
            row = first + number * layout.micro_batch_size
            wanted = _part(expected.outputs.get(name, []), seen, row, layout, world.rank)
            if wanted is not None:
                differences.append(of_tensor((0, "output", name), seen, wanted, floor=0.0))
    floor = GRADIENT_FLOOR * root_mean_square(expected.gradients.values())
    for name, parameter in engine.named_parameters():
        gradient, wanted = parameter.grad, expected.gradients.get(name)
        if gradient is not None and wanted is not None:
            differences.append(of_tensor((0, "gradient", name), gradient, wanted, floor=floor))
    return [replace(difference, rank=world.rank) for difference in differences]


def _part(
    calls: Sequence[Tensor], seen: Tensor, row: int, layout: Layout, rank: int
) -> Tensor | None:
    """Return the part of the plain model's output that a rank's micro-batch has; None: not known.

    Samples are those of the micro-batch. A dim that is as much smaller as an axis is large is this
    rank's piece of it.
    """
    if not calls or any(call.ndim != seen.ndim for call in calls) or seen.ndim < 2:
        return None
    whole = torch.cat([*calls]) if len(calls) > 1 else calls[0]
    samples = layout.micro_batch_size * layout.micro_batches * layout.data_ranks
    if (whole.shape[0], seen.shape[0]) != (samples, layout.micro_batch_size):
        return None  # not of samples: of positions, or of tokens that experts share out
    part, place = whole[row : row + seen.shape[0]], layout.coordinates(rank)
    if layout.context > 1 and part.shape[1] % (2 * layout.context) == 0:
        pieces = part.chunk(2 * layout.context, 1)  # one of the beginning and one of the end
        part = torch.cat((pieces[place["cp"]], pieces[-1 - place["cp"]]), 1)
    for dim in range(1, seen.ndim):
        if part.shape[dim] == seen.shape[dim]:
            continue
        if part.shape[dim] != seen.shape[dim] * layout.tensor:
            return None
        part = part.chunk(layout.tensor, dim)[place["tp"]]
    return part


def _record(recorded: _Recorded, modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for name, part in module.named_modules():
            if name:
                part.register_forward_hook(_noting(recorded.outputs, name))


def _noting(outputs: dict[str, list[Tensor]], name: str) -> Any:
    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return  # shapes are tried out
        for tensor in _floating(output):
            calls = outputs.setdefault(name, [])
            if not any(torch.equal(tensor, before) for before in calls):  # not computed again
                calls.append(tensor.detach().clone())

    return note


def _floating(outputs: Any) -> Iterable[Tensor]:
    """Return the first tensor of numbers that a module returns."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return [
        tensor for tensor in parts if isinstance(tensor, Tensor) and tensor.is_floating_point()
    ][:1]
