"""An engine that compares each of its steps with the reference while it runs.

It can be driven step by step, or by the unchanged training loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.data.datasets.dataset import AnyBatch
from axonlaunch.engines.engine import Engine
from axonlaunch.models.build import spec_for
from axonlaunch.models.fake.output_regions import MicroBatchPlace, region
from axonlaunch.models.specs.custom_loss import build_custom_loss
from axonlaunch.verification.decisions.chosen_experts import ChoicesInBackward, ChosenExperts
from axonlaunch.verification.decisions.random_draws import Draw, DrawProbe
from axonlaunch.verification.references import comparison_inputs
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import (
    Difference,
    compare_numbers,
    compare_tensors,
)
from axonlaunch.verification.references.reference_values import Reference, ReferenceStep
from axonlaunch.verification.references.tolerances import floors


class ComparedEngine:
    """Wraps an engine of one rank and compares the results of its steps with the reference.

    Steps are counted independently of the engine. Dropout is off in training, because layouts draw
    different masks. In evaluations it has its configured rate and must not have any effect.

    Attributes:
        done: Number of steps of the run so far.
        draws: Random numbers that the rank drew in training.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        reference: Reference,
        plan: ComparisonPlan,
        *,
        rank: int,
        world_size: int,
        done: int,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: Engine of this rank.
            config: Configuration of the layout.
            reference: Values computed by one process.
            plan: Length and scope of the comparison.
            rank: Global rank of the engine.
            world_size: Number of ranks of the layout.
            done: Number of steps of the run so far.
        """
        self._engine = engine
        self._reference, self._plan = reference, plan
        self._custom_loss = build_custom_loss(config.train)
        self._is_scaled = PRECISIONS[config.train.precision].needs_loss_scale
        self._rank, self._layout = rank, Layout.of(config, world_size=world_size)
        self._shard = self._layout.data_shard(rank)
        self._dropout = comparison_inputs.Dropout(engine.modules)
        self._probe: DrawProbe | None = None
        # Compiled code draws other numbers. Models with dropout record their masks instead.
        if not config.train.compile and not reference.dropout:
            self._probe = DrawProbe(spec_for(config), engine.modules, rank=rank)
        self._chosen: ChosenExperts | None = None
        if reference.num_experts and not config.train.compile:
            self._chosen = ChosenExperts(
                spec_for(config), engine.modules, num_experts=reference.num_experts
            )
        self._choices_again: ChoicesInBackward | None = None
        if self._chosen is not None and config.train.recomputation != "none":
            self._choices_again = ChoicesInBackward(num_experts=reference.num_experts)
        self._differences: list[Difference] = []
        self._gradient_differences: list[Difference] = []
        self.done = done
        self.draws: list[Draw] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def take(self) -> list[Difference]:
        """Return the differences since the last call, and clear them."""
        differences, self._differences = self._differences, []
        return differences

    def make_uneven(self, batch: AnyBatch, *, step: int) -> AnyBatch:
        """Mask some targets in this rank's rows of a global batch."""
        return comparison_inputs.make_uneven(
            batch, step=step, shard=self._shard, custom_loss=self._custom_loss
        )

    def backward(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Mask some targets, then compute and compare loss and gradients."""
        expected = self._expected
        if expected is None:
            return self._engine.backward(batch)
        rate = compare_numbers(self.done, "rate", self._engine.learning_rate(), expected.rate)
        if self._probe is not None:
            self._probe.step = self.done + 1
        batch = self.make_uneven(batch, step=self.done)
        if self._chosen is not None:
            self._chosen.begin(expected.choices, self._place_choice)
        again = self._choices_again if not self.done else None
        with self._chosen or nullcontext(), again or nullcontext():
            loss, counted = self._engine.backward(batch)
        if self._probe is not None:
            self.draws += self._probe.draws
            self._probe.draws = []
        for other in () if self._chosen is None else self._chosen.others:
            choice = (self.done + 1, "choice", other.block, other.gap)
            self._differences.append(Difference(*choice, count=other.tokens))
        if again is not None and again.tokens:
            self._differences.append(Difference(1, "again", "", math.inf, count=again.tokens))
        self._differences += [
            rate,
            compare_numbers(self.done, "loss", float(loss), expected.loss),
            compare_numbers(self.done, "counted", float(counted), expected.counted),
        ]
        self._gradient_differences = [*self._gradients(expected)]
        return loss, counted

    def update(self, *, known_norm: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Update, then compare the gradient norm and the steps that fp16 skips."""
        expected, number = self._expected, self.done
        self.done += 1
        if expected is None:
            return self._engine.update(known_norm=known_norm)
        if self._is_scaled and number == self._plan.overflow:
            self._overflow(next(iter(expected.gradients)))
        norm, skipped = self._engine.update(known_norm=known_norm)
        self._differences += [
            compare_numbers(number, "skip", float(skipped or 0), float(expected.skipped)),
            compare_numbers(number, "scale", self._engine.loss_scale, expected.scale),
        ]
        if not (skipped and expected.skipped):
            self._differences += self._gradient_differences
            if norm is not None:
                self._differences.append(
                    compare_numbers(number, "norm", float(norm), expected.norm)
                )
        return norm, skipped

    def evaluate(self, batch: AnyBatch) -> Tensor:
        """Evaluate with the configured dropout rates."""
        with self._dropout.on():
            return self._engine.evaluate(batch)

    def predict(self, samples: Tensor) -> Tensor:
        """Predict with the configured dropout rates."""
        with self._dropout.on():
            return self._engine.predict(samples)

    @property
    def _expected(self) -> ReferenceStep | None:
        """Reference values of the next step; None after the last step."""
        steps = self._reference.steps
        return steps[self.done] if self.done < len(steps) else None

    def _place_choice(self, full: Tensor, part: torch.Size, number: int) -> Tensor | None:
        """Return this rank's part of the choices of a micro-batch; None if unknown."""
        index = region(full.shape, part, MicroBatchPlace(self._layout, self._rank, number))
        return None if index is None else full[index]

    def _overflow(self, name: str) -> None:
        for updated_name, updated in self._engine.named_updated():
            if updated_name == name and updated.grad is not None:
                comparison_inputs.overflow(updated)

    def _gradients(self, expected: ReferenceStep) -> Iterator[Difference]:
        floor = floors(self._reference, self.done)
        for name, updated in self._engine.named_updated():
            if updated.grad is not None:
                quantity = (self.done, "gradient", name)
                # Without a gradient in one process, a layout may have a gradient of zeros.
                gradient = expected.gradients.get(name)
                gradient = torch.zeros(updated.shape) if gradient is None else gradient
                yield compare_tensors(quantity, updated.grad, gradient, floor=floor)
        for name, parameter in self._engine.named_parameters():
            if parameter.requires_grad == (name in self._reference.frozen):
                yield Difference(self.done + 1, "gradient", name, math.inf)
