"""An engine whose steps are compared with one process's as they are done, whoever asks for them.

That is a comparison, step by step, or the training loop, which knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout
from axonlaunch.data.dataset import AnyBatch
from axonlaunch.engines.base import Engine
from axonlaunch.models.build import spec_for
from axonlaunch.models.own_loss import own_loss
from axonlaunch.verification import comparison_inputs
from axonlaunch.verification.comparison_plan import ComparisonPlan
from axonlaunch.verification.differences import Difference, of_number, of_tensor
from axonlaunch.verification.random_draws import Draw, DrawProbe
from axonlaunch.verification.reference_values import Reference, ReferenceStep
from axonlaunch.verification.tolerances import floors


class ComparedEngine:
    """Passes everything on to a rank's engine, and compares what its steps give.

    Steps are counted here, whatever the engine takes them for. Dropout is off in training, which no
    two layouts draw alike, and on in evaluations, which must draw none.

    Attributes:
        done: Steps of the run so far.
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
        """Surround an engine.

        Args:
            engine: A rank's.
            config: The layout's.
            reference: What one process computes.
            plan: How long.
            rank: Whose engine it is.
            world_size: Ranks of the layout.
            done: Steps of the run so far.
        """
        self._engine = engine
        self._reference, self._plan = reference, plan
        self._own = own_loss(config.train)
        self._is_fp16 = config.train.precision == "fp16"
        self._shard = Layout.of(config, world_size=world_size).data_shard(rank)
        self._dropout = comparison_inputs.Dropout(engine.modules)
        self._probe: DrawProbe | None = None
        # What is compiled draws otherwise; a model with dropout draws by itself, with it on.
        if not config.train.compile and not reference.dropout:
            self._probe = DrawProbe(spec_for(config), engine.modules, rank=rank)
        self._found: list[Difference] = []
        self._of_gradients: list[Difference] = []
        self.done = done
        self.draws: list[Draw] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def take(self) -> list[Difference]:
        """Return what was compared since the last call."""
        found, self._found = self._found, []
        return found

    def uneven(self, batch: AnyBatch, *, step: int) -> AnyBatch:
        """Return this rank's rows of a global batch with targets left out."""
        return comparison_inputs.uneven(batch, step=step, shard=self._shard, own=self._own)

    def backward(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Compare loss and gradients; targets are left out first."""
        expected = self._expected
        if expected is None:
            return self._engine.backward(batch)
        rate = of_number(self.done, "rate", self._engine.learning_rate(), expected.rate)
        if self._probe is not None:
            self._probe.step = self.done + 1
        loss, counted = self._engine.backward(self.uneven(batch, step=self.done))
        if self._probe is not None:
            self.draws += self._probe.draws
            self._probe.draws = []
        self._found += [
            rate,
            of_number(self.done, "loss", float(loss), expected.loss),
            of_number(self.done, "counted", float(counted), expected.counted),
        ]
        self._of_gradients = [*self._gradients(expected)]
        return loss, counted

    def update(self, *, known_norm: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Compare the gradient's norm, and what fp16 leaves out."""
        expected, number = self._expected, self.done
        self.done += 1
        if expected is None:
            return self._engine.update(known_norm=known_norm)
        if self._is_fp16 and number == self._plan.overflow:
            self._overflow(next(iter(expected.gradients)))
        norm, skipped = self._engine.update(known_norm=known_norm)
        self._found += [
            of_number(number, "skip", float(skipped or 0), float(expected.skipped)),
            of_number(number, "scale", self._engine.loss_scale, expected.scale),
        ]
        if not (skipped and expected.skipped):
            self._found += self._of_gradients
            if norm is not None:
                self._found.append(of_number(number, "norm", float(norm), expected.norm))
        return norm, skipped

    def evaluate(self, batch: AnyBatch) -> Tensor:
        """Evaluate with the model's own dropout."""
        with self._dropout.on():
            return self._engine.evaluate(batch)

    def predict(self, samples: Tensor) -> Tensor:
        """Predict with the model's own dropout."""
        with self._dropout.on():
            return self._engine.predict(samples)

    @property
    def _expected(self) -> ReferenceStep | None:
        """The next step in one process; None: it does no more."""
        steps = self._reference.steps
        return steps[self.done] if self.done < len(steps) else None

    def _overflow(self, name: str) -> None:
        for known, updated in self._engine.named_updated():
            if known == name and updated.grad is not None:
                comparison_inputs.overflow(updated)

    def _gradients(self, expected: ReferenceStep) -> Iterator[Difference]:
        floor = floors(self._reference, self.done)
        for name, updated in self._engine.named_updated():
            if updated.grad is not None:
                where = (self.done, "gradient", name)
                # What one process has no gradient of may have one of zero elsewhere.
                whole = expected.gradients.get(name)
                nothing = torch.zeros(updated.shape) if whole is None else whole
                yield of_tensor(where, updated.grad, nothing, floor=floor)
        for name, parameter in self._engine.named_parameters():
            if parameter.requires_grad == (name in self._reference.frozen):
                yield Difference(self.done + 1, "gradient", name, math.inf)
