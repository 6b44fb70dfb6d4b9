"""A rank's side of a comparison: the layout's engine does the steps, and each number is compared.

It judges nothing; every rank compares what it holds.
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
from torch.distributed.tensor import DTensor

from axonlaunch import checkpoint, data
from axonlaunch.checkpoint.saver import Saver
from axonlaunch.checkpoint.weights import load_initial_weights
from axonlaunch.comm import World
from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.layout import Layout
from axonlaunch.data.dataset import Batch, sample_inputs
from axonlaunch.data.loader import Loader, rank_loader, whole_loader
from axonlaunch.engines.base import Engine
from axonlaunch.engines.build import build_engine
from axonlaunch.training.bare_fit import bare_fit
from axonlaunch.training.worker import load_run_state
from axonlaunch.verification import comparison_inputs
from axonlaunch.verification.compared_engine import ComparedEngine
from axonlaunch.verification.comparison_plan import EVALUATED_BATCHES, ComparisonPlan
from axonlaunch.verification.data_checks import other_ranks_samples
from axonlaunch.verification.differences import Difference, of_number, of_tensor
from axonlaunch.verification.random_draws import Draw, MaskRecorder
from axonlaunch.verification.reference_values import Reference
from axonlaunch.verification.saved_state import read_by_one_process, read_in_parts
from axonlaunch.verification.tolerances import PARAMETER_FLOOR, state_floors

STEPS_OF_MASKS = 2
"""Steps whose masks are compared, of models with dropout."""


def prepared_engine(
    config: RunConfig, world: World, *, drops: bool = False
) -> tuple[Engine, Loader]:
    """Build a rank's engine, with its initial weights, and its data.

    Args:
        config: The layout's.
        world: Its ranks; all of them call this.
        drops: Whether dropout stays as the model has it; it is off otherwise.
    """
    engine, loader = _build(config, world)
    load_initial_weights(engine, config, world=world)
    comparison_inputs.move_vectors(engine.named_parameters())
    if not drops:
        comparison_inputs.Dropout(engine.modules)
    return engine, loader


def _build(config: RunConfig, world: World) -> tuple[Engine, Loader]:
    """Build a rank's engine, which holds no weights yet, and its data."""
    layout = Layout.of(config, world_size=world.world_size)
    dataset = data.build_dataset(config.data, config.tokenizer)
    loader = rank_loader(config, dataset, layout=layout, rank=world.rank)
    return build_engine(config, world, sample=sample_inputs(dataset)), loader


@dataclass(frozen=True)
class RankReport:
    """What a rank found.

    Attributes:
        differences: Every quantity's, here.
        draws: Random numbers that it drew in training.
    """

    differences: list[Difference]
    draws: list[Draw]


def compare(
    config: RunConfig, world: World, reference: Reference, plan: ComparisonPlan, *, folder: Path
) -> RankReport:
    """Run the same steps as one rank of the layout; return every quantity's difference here.

    Args:
        config: The layout's.
        world: Its ranks; all of them call this.
        reference: What one process computes.
        plan: How long.
        folder: Where a checkpoint may be written, the same for every rank.
    """
    run = _LayoutRun(config, world, reference, plan)
    differences = [replace(difference, rank=world.rank) for difference in run.differences(folder)]
    draws = run.draws
    if reference.dropout and not config.train.compile:
        draws = _masks(config, world)
    return RankReport(differences, draws)


def _masks(config: RunConfig, world: World) -> list[Draw]:
    """Return the masks that this rank's model draws in some steps, with dropout on.

    Before each step but the first is an evaluation, after which it must draw again.
    """
    engine, loader = prepared_engine(config, world, drops=True)
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
    """One rank's run."""

    def __init__(
        self, config: RunConfig, world: World, reference: Reference, plan: ComparisonPlan
    ) -> None:
        self._config, self._world = config, world
        self._reference, self._plan = reference, plan
        self.draws: list[Draw] = []
        engine, self._loader = prepared_engine(config, world, drops=True)
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
        """Build an engine that knows nothing of what was before, and load what a run resumes from.

        Args:
            folder: Where the run has its checkpoints.
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
        """Yield what differs, in the order of what is done."""
        plan = self._plan
        yield self._samples_of_others()
        yield from self._tables(0)
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
        """Compare steps until the checkpoint, whose data is read ahead as a run's is."""
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
        """Let the training loop do the steps after the checkpoint, and compare what it reports."""
        plan, reference = self._plan, self._reference
        end = reference.end_evaluation
        train = replace(
            self._config.train,
            steps=plan.steps,
            log_every=1,
            eval_every=0,  # after the last step alone
            eval_batches=0 if end is None else EVALUATED_BATCHES,
            early_stop=None,
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
        yield of_number(plan.steps - 1, "steps", float(self._engine.done), float(plan.steps))
        of_steps = plan.steps - plan.saved
        yield of_number(plan.steps - 1, "logged", float(len(logged)), float(of_steps))
        yield of_number(plan.steps - 1, "evaluated", float(len(evaluated)), float(end is not None))
        for number, shown in enumerate(logged[:of_steps], start=plan.saved):
            expected = reference.steps[number]
            yield of_number(number, "steps", shown.step, number + 1)
            yield of_number(number, "rate", shown.lr, expected.rate)
            yield of_number(number, "loss", shown.loss, expected.loss)
            yield of_number(number, "counted", shown.tokens, expected.counted)
            yield of_number(number, "seen", shown.tokens_seen or 0, self._targets_seen(number + 1))
            if shown.grad_norm is not None and not expected.skipped:
                yield of_number(number, "norm", shown.grad_norm, expected.norm)
        if end is not None:
            for found in evaluated:
                yield of_number(plan.steps - 1, "evaluation", found.eval_loss, end[0])
                yield of_number(plan.steps - 1, "evaluation", found.eval_tokens, end[1])

    def _targets_seen(self, steps: int) -> float:
        """Return the targets that counted in the first steps."""
        return sum(step.counted for step in self._reference.steps[:steps])

    def _samples_of_others(self) -> Difference:
        """Compare which samples this rank reads where epochs end, which no step here does."""
        whole = whole_loader(self._config, self._loader.dataset)
        layout = Layout.of(self._config, world_size=self._world.world_size)
        shard = layout.data_shard(self._world.rank)
        wrong = other_ranks_samples(self._loader, whole, shard=shard)
        return of_number(0, "order", float(wrong), 0.0)

    def _parameters(self, number: int, expected: dict[str, Tensor]) -> Iterator[Difference]:
        for name, parameter in self._engine.named_parameters():
            where = (number, "parameter", name)
            yield of_tensor(where, parameter, expected[name], floor=PARAMETER_FLOOR)

    def _buffers(self, number: int, model: dict[str, Tensor]) -> Iterator[Difference]:
        for name, expected in self._reference.buffers.items():
            if name in model:
                where = (number, "buffer", name)
                yield of_tensor(where, model[name], expected, floor=PARAMETER_FLOOR)

    def _tables(self, number: int) -> Iterator[Difference]:
        """Compare buffers that are not saved, which an engine fills by itself."""
        for module in self._engine.modules:
            for name, seen in module.named_buffers():
                expected = self._reference.tables.get(name)
                if expected is not None and seen.shape == expected.shape:
                    yield of_tensor((number, "buffer", name), seen, expected, floor=PARAMETER_FLOOR)
                    yield from self._of_type(number, f"values of {name}", seen, expected)

    def _states(self, number: int) -> Iterator[Difference]:
        """Compare what is saved, before anything else reads it after the update, as in a run."""
        state, floor = self._engine.state_dict(), state_floors(self._reference.states)
        for name, expected in self._reference.parameters.items():
            if name in state["model"]:
                where = (number, "parameter", name)
                seen = state["model"][name]
                yield of_tensor(where, seen, expected, floor=PARAMETER_FLOOR)
                yield from self._of_type(number, f"values of {name}", seen, expected)
        yield from self._buffers(number, state["model"])
        for key, seen in state["optimizer"].items():
            if key in self._reference.states:
                where = (number, "state", key)
                least, expected = (
                    floor.get(key.rpartition(".")[2], 0.0),
                    self._reference.states[key],
                )
                yield of_tensor(where, seen, expected, floor=least)
                if seen.ndim:  # numbers of Python's are saved in a type of ours
                    yield from self._of_type(number, f"values of {key}", seen, expected)

    def _evaluation(self) -> Iterator[Difference]:
        """Compare the loss of some held-out samples, and outputs for a few of them."""
        if self._reference.evaluation is None:
            return
        part = comparison_inputs.evaluated_samples(self._loader)
        sums = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        for number, held_out in enumerate(self._loader.eval_batches(part=part)):
            sums += self._engine.evaluate(self._engine.uneven(held_out, step=number))
        if self._world.world_size > 1:
            dist.all_reduce(sums)
        loss, counted = self._reference.evaluation
        half = self._plan.halfway - 1
        yield of_number(half, "evaluation", float(sums[0] / sums[1].clamp(min=1)), loss)
        yield of_number(half, "evaluation", float(sums[1]), counted)
        if self._reference.prediction is not None:
            whole = whole_loader(self._config, self._loader.dataset)
            whole_batch = next(whole.eval_batches(1, part=part))
            assert isinstance(whole_batch, Batch)
            outputs = self._engine.predict(
                comparison_inputs.predicted_samples(self._config, whole_batch)
            )
            where, expected = (half, "prediction", ""), self._reference.prediction
            yield of_tensor(where, outputs, expected, floor=0.0)
            yield from self._of_type(half, "outputs", outputs, expected)

    def _of_type(
        self, number: int, name: str, seen: Tensor, expected: Tensor
    ) -> Iterator[Difference]:
        """Yield that something is in another arithmetic, perhaps within what rounding explains."""
        if seen.dtype != expected.dtype and not self._plan.fp64:
            yield Difference(number + 1, "arithmetic", f"{name} are {seen.dtype}", math.inf)

    def _checkpoint(self, folder: Path) -> Iterator[Difference]:
        """Save, let one process read it, and continue from it with an engine that knows nothing."""
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
        _forget(state)  # as training does, while a save in the background still writes
        saver.close()
        saved = checkpoint.find_checkpoint(folder)
        assert saved is not None
        if self._world.is_main:
            yield from read_by_one_process(saved, self._reference)
        if self._world.world_size > 1:
            dist.barrier()
        yield from read_in_parts(saved, self._reference, world=self._world)
        self._resume(folder)
        yield from self._tables(step)
        # No later step of training would show that these were not read.
        yield from self._buffers(step - 1, self._engine.state_dict()["model"])


def _forget(state: dict[str, Any]) -> None:
    """Overwrite tensors in place."""
    for value in state.values():
        if isinstance(value, dict):
            _forget(value)
        else:
            local = value.to_local() if isinstance(value, DTensor) else value
            local.detach().zero_()
