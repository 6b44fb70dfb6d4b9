"""Two steps of the plain model and of a layout, tensor by tensor: what each gave of what.

It pairs tensors by name, in the order in which a step computes them, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.models.build import spec_for
from axonlaunch.models.dtensor_regions import held_boxes
from axonlaunch.models.output_regions import MicroBatchPlace, join_outputs, region
from axonlaunch.models.own_loss import own_loss
from axonlaunch.verification import comparison_inputs
from axonlaunch.verification.comparison_config import lowered_thresholds, with_smooth_updates
from axonlaunch.verification.comparison_plan import ComparisonPlan
from axonlaunch.verification.layout_run import prepared_engine
from axonlaunch.verification.module_recorder import ModuleRecord, ModuleRecorder
from axonlaunch.verification.plain_model import leaving_no_trace, threads_for
from axonlaunch.verification.reference import PlainRun

_STEPS = 2
"""A first one, and another after an update."""
WhatDiffers = Literal["output", "output gradient", "gradient", "parameter"]
Index = tuple[Any, ...]


@dataclass(frozen=True)
class Pair:
    """What a rank has of a tensor, and what it should have.

    Attributes:
        rank: Whose.
        seen: The layout's.
        expected: The plain model's, of the same shape.
        index: Where that is in the whole tensor.
    """

    rank: int
    seen: Tensor
    expected: Tensor
    index: Index


@dataclass(frozen=True)
class Quantity:
    """A tensor of a step on both sides.

    Attributes:
        step: From 1.
        kind: What of the name it is.
        name: A module's, or a parameter's.
        plain: The whole, of the plain model.
        pairs: Of the ranks; empty where they have nothing that could be compared.
        before: Of a parameter: before the step's update.
        missing: Rank -> micro-batches that a module computed, where that is not all of them.
    """

    step: int
    kind: WhatDiffers
    name: str
    plain: Tensor
    pairs: list[Pair]
    before: Tensor | None = None
    missing: Mapping[int, int] = field(default_factory=dict)


@dataclass
class _Step:
    """A step of one side; a plain model has one box of each parameter, the whole."""

    modules: ModuleRecord
    skipped: bool = False
    gradients: dict[str, list[tuple[Index, Tensor]]] = field(default_factory=dict)
    parameters: dict[str, list[tuple[Index, Tensor]]] = field(default_factory=dict)


class BothSides:
    """The first steps of a run, in its layout on the mock world and in one process.

    Attributes:
        layout: The run's.
    """

    def __init__(self, config: RunConfig, *, fp64: bool = False) -> None:
        """Run both.

        Args:
            config: Checked, small enough to be run on the mock world twice.
            fp64: Whether the plain model computes in float64.
        """
        config = with_smooth_updates(config)
        ranks = num_ranks(config)
        self.layout = Layout.of(config, world_size=ranks)
        plan = ComparisonPlan(steps=_STEPS, fp64=fp64)
        with threads_for(config), lowered_thresholds(plan):
            self._start, self._plain = _plain_steps(config, plan)
            world = World.mock(ranks, device=config.launch.device)
            self._ranks = world.run(lambda member: _rank_steps(config, member))
        # A layout's losses are larger, for it averages over ranks what has to be summed; in fp16
        # the plain model's are too.
        is_fp16 = config.train.precision == "fp16"
        self._factor = 1.0 if is_fp16 else 1.0 / self.layout.gradient_ranks

    def quantities(self) -> Iterator[Quantity]:
        """Yield every tensor in the order in which both sides compute them."""
        before = self._start
        for number, plain in enumerate(self._plain):
            names = [*plain.modules.outputs]
            for name in names:
                yield self._output(number, name)
            # Gradients that fp16 overflowed in are nobody's.
            left = {} if plain.skipped else dict.fromkeys(plain.gradients)
            for name in reversed(names) if left else ():
                yield self._output_gradient(number, name)
                own = [p for p in left if p.rpartition(".")[0] == name]
                for parameter in own:
                    del left[parameter]
                    yield self._of_parameter(number, "gradient", parameter)
            for parameter in left:
                yield self._of_parameter(number, "gradient", parameter)
            for parameter in plain.parameters:
                yield self._of_parameter(number, "parameter", parameter, before[parameter])
            before = {name: boxes[0][1] for name, boxes in plain.parameters.items()}

    def readers(self, step: int, module: str) -> list[str]:
        """Return the innermost modules that are given what a module gave, in order."""
        return self._plain[step - 1].modules.readers.get(module, [])

    def _output(self, number: int, name: str) -> Quantity:
        plain = join_outputs(self._plain[number].modules.outputs[name], self.layout)
        pairs_of_all, missing = [], {}
        for rank, steps in enumerate(self._ranks):
            modules = steps[number].modules
            if name in modules.partial:
                continue
            calls = modules.outputs.get(name, [])[: self.layout.micro_batches]
            pairs = self._pairs(number, name, rank, plain, calls)
            pairs_of_all += pairs
            if len(pairs) < self.layout.micro_batches and self._are_of_samples(pairs, plain):
                missing[rank] = len(pairs)
        whole_output = torch.empty(0) if plain is None else plain
        return Quantity(number + 1, "output", name, whole_output, pairs_of_all, missing=missing)

    def _output_gradient(self, number: int, name: str) -> Quantity:
        known = self._plain[number].modules.gradients.get(name, [])
        plain = join_outputs([g for g in known if g is not None], self.layout)
        pairs = []
        for rank, steps in enumerate(self._ranks):
            calls = steps[number].modules.gradients.get(name, [])[: self.layout.micro_batches]
            pairs += self._pairs(number, name, rank, plain, calls, of_gradients=True)
        whole_gradient = torch.empty(0) if plain is None else plain
        return Quantity(number + 1, "output gradient", name, whole_gradient, pairs)

    def _pairs(
        self,
        number: int,
        name: str,
        rank: int,
        plain: Tensor | None,
        calls: Sequence[Tensor | None],
        *,
        of_gradients: bool = False,
    ) -> list[Pair]:
        pairs = []
        factor = self._factor if of_gradients else 1.0
        pieces = self._ranks[rank][number].modules.pieces.get(name, 1)
        for micro_batch, seen in enumerate(calls):
            if plain is None or seen is None:
                continue
            place = MicroBatchPlace(self.layout, rank, micro_batch)
            index = region(plain.shape, seen.shape, place, pieces=pieces, of_samples=of_gradients)
            if index is not None:
                pairs.append(Pair(rank, seen * factor, plain[index], index))
        return pairs

    def _are_of_samples(self, pairs: Sequence[Pair], plain: Tensor | None) -> bool:
        """Say whether there are tensors of some samples: a table of positions is there once."""
        if not pairs or plain is None:
            return False
        place = MicroBatchPlace(self.layout, pairs[0].rank, 0)
        return region(plain.shape, pairs[0].seen.shape, place, of_samples=True) is not None

    def _of_parameter(
        self, number: int, kind: WhatDiffers, name: str, before: Tensor | None = None
    ) -> Quantity:
        def boxes_of(step: _Step) -> dict[str, list[tuple[Index, Tensor]]]:
            return step.gradients if kind == "gradient" else step.parameters

        plain = boxes_of(self._plain[number])[name][0][1]
        pairs = [
            Pair(rank, seen, plain[index], index)
            for rank, steps in enumerate(self._ranks)
            for index, seen in boxes_of(steps[number]).get(name, [])
            if plain[index].shape == seen.shape
        ]
        return Quantity(number + 1, kind, name, plain, pairs, before)


def _plain_steps(config: RunConfig, plan: ComparisonPlan) -> tuple[dict[str, Tensor], list[_Step]]:
    """Return parameters at the start, and the steps of the plain model."""
    with leaving_no_trace(config):
        run = PlainRun(config, plan)
        recorder = ModuleRecorder([run.model])
        start = {name: _copy(parameter) for name, parameter in run.model.named_parameters()}
        steps = []
        for number in range(_STEPS):
            recorder.begin()
            done = run.step(number)
            step = _Step(recorder.record, skipped=done.skipped)
            step.gradients = {name: [((...,), g)] for name, g in done.gradients.items()}
            for name, parameter in run.model.named_parameters():
                step.parameters[name] = [((...,), _copy(parameter))]
            steps.append(step)
        return start, steps


def _rank_steps(config: RunConfig, world: World) -> list[_Step]:
    engine, loader = prepared_engine(config, world)
    shard = Layout.of(config, world_size=world.world_size).data_shard(world.rank)
    # Logits that are computed in chunks are never there.
    spec, is_chunked = spec_for(config), config.train.loss_chunk is not None
    heads = [spec.head_of(module) for module in engine.modules] if is_chunked else []
    recorder = ModuleRecorder(engine.modules, but=heads)
    steps = []
    with closing(loader.iterate()) as batches:  # read ahead, as a run's are
        read = [next(batches) for _ in range(_STEPS)]
    for number, batch in enumerate(read):
        recorder.begin()
        engine.backward(
            comparison_inputs.uneven(batch, step=number, shard=shard, own=own_loss(config.train))
        )
        step = _Step(recorder.record)
        for name, updated in engine.named_updated():
            if updated.grad is not None:
                step.gradients.setdefault(name, []).extend(_boxes(updated.grad))
        engine.update()
        for name, parameter in engine.named_parameters():
            step.parameters.setdefault(name, []).extend(_boxes(parameter))
        steps.append(step)
    return steps


def _boxes(tensor: Tensor) -> list[tuple[Index, Tensor]]:
    return [(index, held.cpu()) for index, held in held_boxes(tensor)]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
