"""Records every tensor of two training steps of the reference model and of a layout.

Tensors are paired by name, in the order in which a step computes them. The caller (``locate``)
decides whether a pair is close enough.
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
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake.output_regions import MicroBatchPlace, join_outputs, region
from axonlaunch.models.specs.custom_loss import build_custom_loss
from axonlaunch.models.tensors.dtensor_regions import held_boxes
from axonlaunch.verification.comparison.comparison_config import (
    lowered_thresholds,
    with_smooth_updates,
)
from axonlaunch.verification.comparison.layout_run import prepared_engine
from axonlaunch.verification.locating.module_recorder import ModuleRecord, ModuleRecorder
from axonlaunch.verification.references import comparison_inputs
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.plain_model import preserving_global_state, threads_for
from axonlaunch.verification.references.reference import PlainRun

_STEPS = 2
"""Number of recorded steps. The second one starts from updated parameters."""
QuantityKind = Literal["output", "output gradient", "gradient", "parameter"]
Index = tuple[Any, ...]


@dataclass(frozen=True)
class Pair:
    """One rank's shard of a tensor and the matching slice of the reference.

    Attributes:
        rank: Global rank that holds the shard.
        actual: The shard, as computed by the layout.
        expected: The slice of the reference tensor, same shape as ``actual``.
        index: Slices that select the shard from the full tensor.
    """

    rank: int
    actual: Tensor
    expected: Tensor
    index: Index


@dataclass(frozen=True)
class Quantity:
    """A tensor of a step, in the reference and on all ranks of the layout.

    Attributes:
        step: Number of the step, from 1.
        kind: Output or gradient of a module, or gradient or value of a parameter.
        name: Name of the module or parameter.
        plain: Full tensor of the reference model.
        pairs: Shards of the ranks; empty if no rank has a comparable tensor.
        previous: Value of a parameter before the update of this step; None for other kinds.
        missing: Maps ranks that computed only some micro-batches of a module to their number.
    """

    step: int
    kind: QuantityKind
    name: str
    plain: Tensor
    pairs: list[Pair]
    previous: Tensor | None = None
    missing: Mapping[int, int] = field(default_factory=dict)


@dataclass
class _Step:
    """A recorded step. The reference has one box for each parameter: the full tensor."""

    modules: ModuleRecord
    skipped: bool = False
    gradients: dict[str, list[tuple[Index, Tensor]]] = field(default_factory=dict)
    parameters: dict[str, list[tuple[Index, Tensor]]] = field(default_factory=dict)


class RecordedSteps:
    """The first two steps of a run, in its layout on the mock world and in one process.

    Attributes:
        layout: Layout of the run.
    """

    def __init__(self, config: RunConfig, *, fp64: bool = False) -> None:
        """Run and record the steps in one process and in the layout.

        Args:
            config: Checked configuration, small enough to run twice on the mock world.
            fp64: Whether the reference model computes in float64.
        """
        config = with_smooth_updates(config)
        ranks = num_ranks(config)
        self.layout = Layout.of(config, world_size=ranks)
        plan = ComparisonPlan(steps=_STEPS, fp64=fp64)
        with threads_for(config), lowered_thresholds(plan):
            self._start, self._plain = _plain_steps(config, plan)
            world = World.mock(ranks, device=config.launch.device)
            self._ranks = world.run(lambda member: _rank_steps(config, member))
        # The losses of a layout are larger by this factor, because gradients are averaged over
        # ranks instead of summed. The fp16 reference multiplies its losses by the same factor.
        is_scaled = PRECISIONS[config.train.precision].needs_loss_scale
        self._factor = 1.0 if is_scaled else 1.0 / self.layout.gradient_ranks

    def quantities(self) -> Iterator[Quantity]:
        """Yield every tensor in the order of computation."""
        previous = self._start
        for number, plain in enumerate(self._plain):
            names = [*plain.modules.outputs]
            for name in names:
                yield self._output(number, name)
            # Overflowed fp16 gradients cannot be compared.
            remaining = {} if plain.skipped else dict.fromkeys(plain.gradients)
            for name in reversed(names) if remaining else ():
                yield self._output_gradient(number, name)
                for parameter in [p for p in remaining if p.rpartition(".")[0] == name]:
                    del remaining[parameter]
                    yield self._parameter_quantity(number, "gradient", parameter)
            for parameter in remaining:
                yield self._parameter_quantity(number, "gradient", parameter)
            for parameter in plain.parameters:
                yield self._parameter_quantity(number, "parameter", parameter, previous[parameter])
            previous = {name: boxes[0][1] for name, boxes in plain.parameters.items()}

    def readers(self, step: int, module: str) -> list[str]:
        """Return the innermost modules that take a module's output as input, in order."""
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
            if len(pairs) < self.layout.micro_batches and self._have_samples(pairs, plain):
                missing[rank] = len(pairs)
        whole_output = torch.empty(0) if plain is None else plain
        return Quantity(number + 1, "output", name, whole_output, pairs_of_all, missing=missing)

    def _output_gradient(self, number: int, name: str) -> Quantity:
        gradients = self._plain[number].modules.gradients.get(name, [])
        plain = join_outputs([g for g in gradients if g is not None], self.layout)
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
        for micro_batch, actual in enumerate(calls):
            if plain is None or actual is None:
                continue
            micro_batch_place = MicroBatchPlace(self.layout, rank, micro_batch)
            index = region(
                plain.shape, actual.shape, micro_batch_place, pieces=pieces, of_samples=of_gradients
            )
            if index is not None:
                pairs.append(Pair(rank, actual * factor, plain[index], index))
        return pairs

    def _have_samples(self, pairs: Sequence[Pair], plain: Tensor | None) -> bool:
        """Return whether an output has a dimension of samples; a table of positions has none.

        Args:
            pairs: Outputs of one rank, one for each of its micro-batches.
            plain: Complete output of the reference; None if it was not recorded.
        """
        if not pairs or plain is None:
            return False
        micro_batch = MicroBatchPlace(self.layout, pairs[0].rank, 0)
        return region(plain.shape, pairs[0].actual.shape, micro_batch, of_samples=True) is not None

    def _parameter_quantity(
        self, number: int, kind: QuantityKind, name: str, previous: Tensor | None = None
    ) -> Quantity:
        def boxes_of(step: _Step) -> dict[str, list[tuple[Index, Tensor]]]:
            return step.gradients if kind == "gradient" else step.parameters

        plain = boxes_of(self._plain[number])[name][0][1]
        pairs = [
            Pair(rank, actual, plain[index], index)
            for rank, steps in enumerate(self._ranks)
            for index, actual in boxes_of(steps[number]).get(name, [])
            if plain[index].shape == actual.shape
        ]
        return Quantity(number + 1, kind, name, plain, pairs, previous)


def _plain_steps(config: RunConfig, plan: ComparisonPlan) -> tuple[dict[str, Tensor], list[_Step]]:
    """Return the initial parameters and the steps of the reference model."""
    with preserving_global_state(config):
        run = PlainRun(config, plan)
        recorder = ModuleRecorder([run.model])
        start = run.copy_parameters()
        steps = []
        for number in range(_STEPS):
            recorder.begin()
            done = run.step(number)
            step = _Step(recorder.record, skipped=done.skipped)
            step.gradients = {name: [((...,), g)] for name, g in done.gradients.items()}
            step.parameters = {n: [((...,), p)] for n, p in run.copy_parameters().items()}
            steps.append(step)
        return start, steps


def _rank_steps(config: RunConfig, world: World) -> list[_Step]:
    engine, loader = prepared_engine(config, world)
    shard = Layout.of(config, world_size=world.world_size).data_shard(world.rank)
    # The outputs of a deferred head are no logits.
    spec, is_deferred = spec_for(config), config.train.defers_head
    heads = [spec.head_of(module) for module in engine.modules] if is_deferred else []
    recorder = ModuleRecorder(engine.modules, exclude=heads)
    steps = []
    with closing(loader.iterate()) as batches:  # with prefetching, as in a run
        global_batches = [next(batches) for _ in range(_STEPS)]
    for number, batch in enumerate(global_batches):
        recorder.begin()
        engine.backward(
            comparison_inputs.make_uneven(
                batch, step=number, shard=shard, custom_loss=build_custom_loss(config.train)
            )
        )
        step = _Step(recorder.record)
        for name, updated in engine.named_updated():
            if updated.grad is not None:
                step.gradients.setdefault(name, []).extend(_boxes(updated.grad))
        engine.update()
        saved = engine.model_state_dict()  # with masters in place of their parameters
        for name in dict.fromkeys(name for name, _ in engine.named_parameters()):
            step.parameters.setdefault(name, []).extend(_boxes(saved[name]))
        steps.append(step)
    return steps


def _boxes(tensor: Tensor) -> list[tuple[Index, Tensor]]:
    return [(index, held.cpu()) for index, held in held_boxes(tensor)]
