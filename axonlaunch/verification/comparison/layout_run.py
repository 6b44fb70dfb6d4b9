"""Runs the steps of one rank of a layout and compares its values with the reference.

Every rank compares the tensors that it holds. ``verdict`` decides which differences pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch import checkpoint, data
from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.precision import quantizes_states
from axonlaunch.data.datasets.dataset import Batch, sample_inputs
from axonlaunch.data.datasets.loader import Loader, full_loader, rank_loader
from axonlaunch.engines.build import build_engine
from axonlaunch.engines.engine import Engine
from axonlaunch.models.build import spec_for
from axonlaunch.models.source_of import source_of
from axonlaunch.training.bare_fit import bare_fit
from axonlaunch.training.worker import load_run_state
from axonlaunch.verification.comparison.compared_engine import ComparedEngine
from axonlaunch.verification.comparison.gradient_sums import hides_rounded_sums, sum_differences
from axonlaunch.verification.comparison.saved_state import read_by_one_process, read_in_parts
from axonlaunch.verification.decisions.random_draws import Draw, MaskRecorder
from axonlaunch.verification.references import comparison_inputs
from axonlaunch.verification.references.comparison_plan import EVALUATED_BATCHES, ComparisonPlan
from axonlaunch.verification.references.data_checks import other_ranks_samples
from axonlaunch.verification.references.differences import (
    Difference,
    compare_numbers,
    compare_tensors,
)
from axonlaunch.verification.references.plain_rounding import saved_values
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.references.tolerances import PARAMETER_FLOOR, state_floors

STEPS_OF_MASKS = 2
"""Number of steps in which dropout masks are recorded."""


def prepared_engine(
    config: RunConfig, world: World, *, keeps_dropout: bool = False
) -> tuple[Engine, Loader]:
    """Build this rank's engine with initial weights, and its loader.

    Args:
        config: Configuration of the layout.
        world: World of the layout; all ranks must call this.
        keeps_dropout: Whether dropout keeps its configured rates; otherwise it is turned off.
    """
    engine, loader = _build(config, world)
    load_initial_weights(engine, config, world=world)
    named, saved = [name for name, _ in engine.named_parameters()], engine.model_state_dict()
    comparison_inputs.move_vectors((name, saved[name]) for name in dict.fromkeys(named))
    engine.load_model_state_dict(saved)
    if not keeps_dropout:
        comparison_inputs.Dropout(engine.modules)
    return engine, loader


def _build(config: RunConfig, world: World) -> tuple[Engine, Loader]:
    """Build this rank's engine without loading initial weights, and its loader."""
    layout = Layout.of(config, world_size=world.world_size)
    dataset = data.build_dataset(config.data, config.tokenizer)
    loader = rank_loader(config, dataset, layout=layout, rank=world.rank)
    config = replace(config, metrics=[])  # the reference computes none
    return build_engine(config, world, sample=sample_inputs(dataset)), loader


@dataclass(frozen=True)
class RankReport:
    """Results of one rank.

    Attributes:
        differences: Differences of all quantities that the rank compared.
        draws: Random numbers that the rank drew in training.
    """

    differences: list[Difference]
    draws: list[Draw]


def compare(
    config: RunConfig, world: World, reference: Reference, plan: ComparisonPlan, *, folder: Path
) -> RankReport:
    """Run the steps as one rank of the layout and return the differences of this rank.

    Args:
        config: Configuration of the layout.
        world: World of the layout; all ranks must call this.
        reference: Values computed by one process.
        plan: Length and scope of the comparison.
        folder: Folder for a checkpoint, the same on every rank.
    """
    run = _LayoutRun(config, world, reference, plan)
    differences = [replace(difference, rank=world.rank) for difference in run.differences(folder)]
    draws = run.draws
    if reference.dropout and not config.train.compile:
        draws = _masks(config, world)
    if spec_for(config).mixes_samples != "none":
        # The loss that balances experts depends on other samples, but gradients are summed alike.
        config = with_values(config, source_of(config).without_router_loss())
    if hides_rounded_sums(config):
        differences += _differences_of_sums(config, world)
    return RankReport(differences, draws)


def _differences_of_sums(config: RunConfig, world: World) -> list[Difference]:
    """Return the differences of sums of gradients, of an engine that is only built for them."""
    engine, loader = prepared_engine(config, world)
    return [*sum_differences(engine, loader.batch(0), config, rank=world.rank)]


def _masks(config: RunConfig, world: World) -> list[Draw]:
    """Return the masks that this rank draws in two steps with dropout on.

    An evaluation precedes the second step, to check that training draws masks again after it.
    """
    engine, loader = prepared_engine(config, world, keeps_dropout=True)
    recorder = MaskRecorder(engine.modules, rank=world.rank)
    for number in range(STEPS_OF_MASKS):
        recorder.step = number + 1
        batch = loader.batch(number)
        if number:
            engine.evaluate(batch)
        with recorder:
            engine.backward(batch)
        engine.update()
    return recorder.draws


class _LayoutRun:
    """Run of one rank: the steps, the checkpoint and the steps after the resume."""

    def __init__(
        self, config: RunConfig, world: World, reference: Reference, plan: ComparisonPlan
    ) -> None:
        self._config, self._world = config, world
        self._reference, self._plan = reference, plan
        self.draws: list[Draw] = []
        engine, self._loader = prepared_engine(config, world, keeps_dropout=True)
        self._engine = self._compare_engine(engine, done=0)
        self._resumed: checkpoint.Checkpoint | None = None

    def _compare_engine(self, engine: Engine, *, done: int) -> ComparedEngine:
        return ComparedEngine(
            engine,
            self._config,
            self._reference,
            self._plan,
            rank=self._world.rank,
            world_size=self._world.world_size,
            done=done,
        )

    def _resume(self, folder: Path) -> None:
        """Build a new engine and resume from the checkpoint, as a run does.

        Args:
            folder: Run folder with the checkpoint.
        """
        config = with_values(
            self._config,
            {
                "run_dir": str(folder),
                "checkpoint.path": None,
                "checkpoint.resume": "auto",
            },
        )
        engine, self._loader = _build(config, self._world)
        self._resumed = load_run_state(config, engine, self._world).checkpoint
        if not config.saves_frozen:
            named = engine.named_parameters()
            comparison_inputs.move_vectors((name, p) for name, p in named if not p.requires_grad)
        self._engine = self._compare_engine(engine, done=self._plan.saved)

    def differences(self, folder: Path) -> Iterator[Difference]:
        """Yield the differences in the order of the run."""
        plan = self._plan
        yield self._epoch_ends()
        yield from self._unsaved_buffers(0)
        yield from self._steps()
        last = plan.saved - 1
        yield from self._states(last)
        if not plan.beyond:
            yield from self._parameters(last, self._reference.parameters)
            return
        yield from self._checkpoint(folder)
        if plan.trains_on:
            yield from self._train_on(folder)
            yield from self._parameters(plan.steps - 1, self._reference.end)

    def _steps(self) -> Iterator[Difference]:
        """Compare the steps until the checkpoint, with data prefetched as in a run."""
        engine = self._engine
        with closing(self._loader.iterate()) as batches:
            while engine.done < self._plan.saved:
                if self._plan.beyond and engine.done == self._plan.halfway:
                    yield from self._evaluation()
                batch = next(batches)
                engine.backward(batch)
                engine.update()
                yield from engine.take()
        self.draws += engine.draws

    def _train_on(self, folder: Path) -> Iterator[Difference]:
        """Run the steps after the checkpoint in the training loop and compare the logged values."""
        plan, reference = self._plan, self._reference
        end = reference.end_evaluation
        train = replace(
            self._config.train,
            steps=plan.steps,
            log_every=1,
            eval_every=0,  # only after the last step
            eval_batches=0 if end is None else EVALUATED_BATCHES,
            early_stop=None,
            best_metric="loss",
        )
        engine = cast("Engine", self._engine)
        logged, evaluated = bare_fit(
            engine,
            self._loader,
            train,
            world=self._world,
            run_dir=folder,
            resumed=self._resumed,
        )
        self.draws += self._engine.draws
        yield from self._engine.take()
        yield compare_numbers(plan.steps - 1, "steps", float(self._engine.done), float(plan.steps))
        remaining = plan.steps - plan.saved
        yield compare_numbers(plan.steps - 1, "logged", float(len(logged)), float(remaining))
        yield compare_numbers(
            plan.steps - 1, "evaluated", float(len(evaluated)), float(end is not None)
        )
        for number, shown in enumerate(logged[:remaining], start=plan.saved):
            expected = reference.steps[number]
            yield compare_numbers(number, "steps", shown.step, number + 1)
            yield compare_numbers(number, "rate", shown.lr, expected.rate)
            yield compare_numbers(number, "loss", shown.loss, expected.loss)
            yield compare_numbers(number, "counted", shown.tokens, expected.counted)
            yield compare_numbers(
                number, "seen", shown.tokens_seen or 0, self._targets_seen(number + 1)
            )
            if shown.grad_norm is not None and not expected.skipped:
                yield compare_numbers(number, "norm", shown.grad_norm, expected.norm)
        if end is not None:
            for found in evaluated:
                yield compare_numbers(plan.steps - 1, "evaluation", found.eval_loss, end[0])
                yield compare_numbers(plan.steps - 1, "evaluation", found.eval_tokens, end[1])

    def _targets_seen(self, steps: int) -> float:
        """Return the number of counted targets in the first steps."""
        return sum(step.counted for step in self._reference.steps[:steps])

    def _epoch_ends(self) -> Difference:
        """Compare this rank's samples at the ends of epochs, after the compared steps."""
        full = full_loader(self._config, self._loader.dataset)
        layout = Layout.of(self._config, world_size=self._world.world_size)
        shard = layout.data_shard(self._world.rank)
        wrong = other_ranks_samples(self._loader, full, shard=shard)
        return compare_numbers(0, "order", float(wrong), 0.0)

    def _parameters(self, number: int, expected: dict[str, Tensor]) -> Iterator[Difference]:
        for name, parameter in self._engine.named_parameters():
            quantity = (number, "parameter", name)
            yield compare_tensors(quantity, parameter, expected[name], floor=PARAMETER_FLOOR)

    def _buffers(self, number: int, model: dict[str, Tensor]) -> Iterator[Difference]:
        for name, expected in self._reference.buffers.items():
            if name in model:
                quantity = (number, "buffer", name)
                yield compare_tensors(quantity, model[name], expected, floor=PARAMETER_FLOOR)

    def _unsaved_buffers(self, number: int) -> Iterator[Difference]:
        """Compare non-persistent buffers, which the engine computes itself."""
        for module in self._engine.modules:
            for name, actual in module.named_buffers():
                expected = self._reference.unsaved_buffers.get(name)
                if expected is not None and actual.shape == expected.shape:
                    yield compare_tensors(
                        (number, "buffer", name), actual, expected, floor=PARAMETER_FLOOR
                    )
                    yield from self._dtype_difference(number, f"values of {name}", actual, expected)

    def _states(self, number: int) -> Iterator[Difference]:
        """Compare the state to be saved.

        As in a run, nothing else reads the parameters between the update and this call.
        """
        state, floor = self._engine.state_dict(), state_floors(self._reference.states)
        for name, expected in self._reference.parameters.items():
            if name in state["model"]:
                quantity = (number, "parameter", name)
                actual = state["model"][name]
                yield compare_tensors(quantity, actual, expected, floor=PARAMETER_FLOOR)
                yield from self._dtype_difference(number, f"values of {name}", actual, expected)
        yield from self._buffers(number, state["model"])
        for key, actual in state["optimizer"].items():
            if key in self._reference.states:
                expected, is_number = self._reference.states[key], not actual.ndim
                if quantizes_states(self._config.optimizer):
                    actual = saved_values(key, actual)
                yield compare_tensors(
                    (number, "state", key),
                    actual,
                    expected,
                    floor=floor.get(key.rpartition(".")[2], 0.0),
                )
                if not is_number:  # Python numbers are saved with a fixed dtype
                    yield from self._dtype_difference(number, f"values of {key}", actual, expected)

    def _evaluation(self) -> Iterator[Difference]:
        """Compare the loss of some held-out samples and the outputs for a few of them."""
        if self._reference.evaluation is None:
            return
        part = comparison_inputs.evaluated_samples(self._loader)
        sums = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        for number, held_out in enumerate(self._loader.eval_batches(part=part)):
            sums += self._engine.evaluate(self._engine.make_uneven(held_out, step=number))
        if self._world.world_size > 1:
            dist.all_reduce(sums)
        loss, counted = self._reference.evaluation
        half = self._plan.halfway - 1
        yield compare_numbers(half, "evaluation", float(sums[0] / sums[1].clamp(min=1)), loss)
        yield compare_numbers(half, "evaluation", float(sums[1]), counted)
        if self._reference.prediction is not None:
            full = full_loader(self._config, self._loader.dataset)
            whole_batch = next(full.eval_batches(1, part=part))
            assert isinstance(whole_batch, Batch)
            outputs = self._engine.predict(
                comparison_inputs.predicted_samples(self._config, whole_batch)
            )
            expected = self._reference.prediction
            yield compare_tensors((half, "prediction", ""), outputs, expected, floor=0.0)
            yield from self._dtype_difference(half, "outputs", outputs, expected)

    def _dtype_difference(
        self, number: int, name: str, actual: Tensor, expected: Tensor
    ) -> Iterator[Difference]:
        """Yield a difference if the dtype differs, even if the values are close."""
        if actual.dtype != expected.dtype and not self._plan.fp64:
            yield Difference(number + 1, "arithmetic", f"{name} are {actual.dtype}", math.inf)

    def _checkpoint(self, folder: Path) -> Iterator[Difference]:
        """Save a checkpoint, compare it as read by others, and resume from it in a new engine."""
        step = self._plan.saved
        saver = Saver(
            folder,
            world=self._world,
            retention=checkpoint.Retention(newest=1),
            background=self._config.checkpoint.async_save,
        )
        state = self._engine.state_dict()
        saver.save(
            state,
            step=step,
            samples=step * self._config.train.global_batch_size,
            tokens=int(self._targets_seen(step)),
            data=self._loader.state(step),
        )
        _overwrite(state)  # as training does while a background save still writes
        saver.close()
        saved = checkpoint.find_checkpoint(folder)
        assert saved is not None
        if self._world.is_main:
            yield from read_by_one_process(saved, self._reference, self._config)
        if self._world.world_size > 1:
            dist.barrier()
        yield from read_in_parts(saved, self._reference, world=self._world)
        self._resume(folder)
        yield from self._unsaved_buffers(step)
        # Later training steps do not show whether buffers were loaded.
        yield from self._buffers(step - 1, self._engine.state_dict()["model"])


def _overwrite(state: dict[str, Any]) -> None:
    """Set all tensors to zero in place."""
    for value in state.values():
        if isinstance(value, dict):
            _overwrite(value)
        else:
            local_part(value).detach().zero_()
