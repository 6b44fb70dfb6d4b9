"""The training loop: decides when to train, log, evaluate and save."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.schema import TrainConfig
from axonlaunch.config.values.intervals import StepInterval, is_due
from axonlaunch.data.datasets.dataset import AnyBatch, counted_in
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.diagnostics.stragglers import Stragglers
from axonlaunch.engines.engine import Engine, StepResult
from axonlaunch.events import (
    Evaluated,
    Finished,
    Monitor,
    Noted,
    Saved,
    StepDone,
    StepLogged,
    perplexity_of,
)
from axonlaunch.models.specs.metrics import Metric
from axonlaunch.training.callbacks import Callbacks, Moment
from axonlaunch.training.ending.early_stop import EvaluationHistory
from axonlaunch.training.ending.invalid_routes import naming_sample
from axonlaunch.training.ending.nonfinite import (
    raise_if_nonfinite,
    raise_if_nonfinite_parameters,
    raise_if_scale_is_exhausted,
)
from axonlaunch.training.ending.stop_vote import StopVote
from axonlaunch.training.measuring.device_use import DeviceUse
from axonlaunch.training.measuring.expert_load import RouterWatch
from axonlaunch.training.measuring.peak_memory import PeakWatch, peak_memory_bytes
from axonlaunch.training.measuring.profiling import StepProfiler
from axonlaunch.training.module_trace.run import RunTracer
from axonlaunch.training.process.garbage import GarbageCollection


@dataclass
class _Progress:
    """Values accumulated since the last logged step and over the whole run."""

    loss: float | None = None
    eval_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: Path | None = None
    evaluated_at: int | None = None
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    tokens_seen: torch.Tensor | int | None = 0
    skipped: torch.Tensor | None = None
    tokens_since: torch.Tensor | int = 0
    tokens: int = 0
    seconds: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    steps_since: int = 0
    waited: float = 0.0
    started: bool = False

    def add(self, result: StepResult) -> None:
        """Add the results of a step, without waiting for the device."""
        self.steps_since += 1
        self.tokens_since = self.tokens_since + result.tokens
        if result.skipped is not None:
            self.skipped = result.skipped + (0 if self.skipped is None else self.skipped)
        if self.tokens_seen is not None:
            self.tokens_seen = self.tokens_seen + result.tokens

    def exclude_since(self, moment: float) -> None:
        """Exclude the time from a moment to now from the measured step time."""
        self.since += time.perf_counter() - moment

    def begin_interval(self, *, loss: float) -> tuple[float, float, float]:
        """Begin a new interval after a logged step.

        Returns:
            Mean seconds per step in the last interval, mean seconds of waiting for data per step,
            and targets per second.
        """
        tokens = int(self.tokens_since)
        now = time.perf_counter()
        seconds = (now - self.since) / self.steps_since
        waited = self.waited / self.steps_since
        if self.started:  # the first step includes one-time work
            self.tokens += tokens
            self.seconds += now - self.since
        self.started = True
        rate = tokens / (now - self.since)
        self.loss, self.since, self.steps_since, self.waited = loss, now, 0, 0.0
        self.tokens_since, self.skipped = 0, None
        return seconds, waited, rate


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """Parts of one rank's training loop.

    Attributes:
        engine: Engine that trains; it may have done steps already.
        loader: Loader of this rank's part of each global batch.
        config: Configuration of the training loop.
        world: The ranks that train.
        monitor: Monitor of this rank. If one of them requests a stop, all ranks stop after the same
            step.
        peak_memory: Measures this rank's peak memory.
        profiler: Profiles the configured steps.
        device_use: Reads device counters at logged steps.
        tracer: Traces the modules in selected steps; None traces no step.
        saver: Saves checkpoints; None saves none.
        save_every: Interval between checkpoints.
        resumed: Checkpoint from which the engine's state was loaded; None if it has done no step.
        blocks: Blocks of the model on this rank, whose times are compared across ranks with GPUs.
        metrics: Metrics of evaluations, in the order in which the engine returns their sums.
        higher_is_better: Whether a higher value of ``train.best_metric`` is better.
        callbacks: Callbacks of the user.
    """

    engine: Engine
    loader: Loader
    config: TrainConfig
    world: World
    monitor: Monitor
    peak_memory: PeakWatch
    profiler: StepProfiler
    device_use: DeviceUse
    tracer: RunTracer | None = None
    saver: Saver | None = None
    save_every: StepInterval = 1
    resumed: Checkpoint | None = None
    blocks: Sequence[nn.Module] = ()
    metrics: Sequence[Metric] = ()
    higher_is_better: bool = False
    callbacks: Callbacks = field(default_factory=Callbacks)


def fit(parts: LoopParts) -> Finished:
    """Train until the last step, until a rank requests a stop, or until early stopping.

    Every rank calls this.

    Args:
        parts: Parts of this rank's loop.
    """
    engine, loader, config, resumed = parts.engine, parts.loader, parts.config, parts.resumed
    if resumed is not None and resumed.data is not None:
        loader.resume(resumed.data)
    with (
        closing(loader.iterate(engine.step)) as batches,
        closing(Stragglers(parts.world, blocks=parts.blocks)) as stragglers,
        GarbageCollection(config.gc_every) as collection,
    ):
        votes = StopVote(parts.world), StopVote(parts.world)
        loop = _Loop(parts, batches, stragglers, *votes, _progress(parts))
        loop.call_back("start")
        is_over = loop.is_exhausted or engine.step >= config.num_steps
        if config.eval_at_start and config.eval_batches and not engine.step:
            loop.evaluate()
        elif not is_over:
            loop.try_metrics()
        interrupted = not is_over and _do_steps(loop, collection)
        parts.profiler.finish()
        if is_over and config.eval_batches:  # the earlier run was stopped before this evaluation
            loop.evaluate()
        loop.call_back("end")
    progress = loop.progress
    done = Finished(
        step=engine.step,
        interrupted=interrupted,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        tokens_per_s=progress.tokens / progress.seconds if progress.seconds else None,
        peak_memory_bytes=parts.peak_memory.peak_bytes(),
        metrics=progress.metrics,
    )
    parts.monitor.report(done)
    parts.monitor.report_phase("done", step=engine.step)
    return done


def _do_steps(loop: _Loop, collection: GarbageCollection) -> bool:
    """Train the remaining steps, and evaluate and save when due.

    Returns:
        Whether a requested stop ended training before the last step, and not early stopping.
    """
    engine, config, saver = loop.parts.engine, loop.parts.config, loop.parts.saver
    num_steps = config.num_steps
    interrupted = stopped = False
    while engine.step < num_steps and not interrupted and not stopped:
        step = engine.step + 1
        last = step == num_steps
        is_saved = saver is not None and (last or loop.is_due(loop.parts.save_every, step))
        is_logged = last or step % config.steps_per_log == 0 or not loop.progress.started
        interrupted = loop.step(step, is_logged=is_logged, is_saved=is_saved)
        loop.call_back("step")
        if loop.is_end_requested() and not last:
            stopped = True
            reason = loop.parts.callbacks.first_reason()
            loop.parts.monitor.report(Noted(f"{reason}; training ends after step {step}"))
        if config.eval_batches and (last or stopped or loop.is_due(config.eval_every, step)):
            loop.evaluate()
            if loop.is_exhausted and not last and not stopped:
                stopped = True
                loop.parts.monitor.report(_early_stop_note(loop.progress.evaluations, config))
        if saver is not None:
            ends_early = interrupted or stopped
            loop.save(saver, ends_early=ends_early, is_due=is_saved, ends=ends_early or last)
        collection.step_done(step)
    return interrupted and not stopped and engine.step < num_steps


@dataclass(frozen=True)
class _Loop:
    """A running loop, with a method for each action: step, evaluate, save.

    Attributes:
        parts: Parts of the loop.
        batches: This rank's part of each global batch, from the next step on.
        stragglers: Compares the times of the ranks.
        vote: Agreement of the ranks on whether to stop.
        end_vote: Agreement of the ranks on whether callbacks end training.
        progress: Accumulated values of the run.
        router_watch: Notices routers that collapse.
    """

    parts: LoopParts
    batches: Iterator[AnyBatch]
    stragglers: Stragglers
    vote: StopVote
    end_vote: StopVote
    progress: _Progress
    router_watch: RouterWatch = field(default_factory=RouterWatch)

    @property
    def is_exhausted(self) -> bool:
        """Whether ``train.best_metric`` has not improved for ``train.early_stop`` evaluations."""
        return self.progress.evaluations.is_exhausted(self.parts.config.early_stop)

    def is_due(self, interval: StepInterval, step: int) -> bool:
        """Return whether an interval between evaluations or checkpoints ends with a step."""
        return is_due(interval, step, epoch=self._epochs)

    def step(self, step: int, *, is_logged: bool, is_saved: bool) -> bool:
        """Train one step; return whether a rank requested a stop."""
        parts, engine, progress = self.parts, self.parts.engine, self.progress
        # fp16 skips updates with gradients that are not finite, and halves its scale.
        is_scaled = PRECISIONS[parts.config.precision].needs_loss_scale
        is_updated = parts.config.optimizer_in_backward  # before its gradients can be checked
        began = time.perf_counter()
        with parts.profiler.step(step):
            progress.exclude_since(began)
            self.vote.cast(stop=parts.monitor.stop())
            if parts.callbacks:
                self.end_vote.cast(stop=bool(parts.callbacks.reasons))
            rate = engine.learning_rate()
            batch = self._read()
            self._begin("stepping")
            with parts.peak_memory.step(engine):
                with naming_sample(parts.loader, step=step - 1):
                    loss, tokens = (parts.tracer or engine).backward(batch)
                norm = None
                if is_saved or (is_logged and not is_scaled):
                    norm = raise_if_nonfinite(
                        engine,
                        loss,
                        world=parts.world,
                        checks_gradients=not is_scaled and not is_updated,
                    )
                result = StepResult(loss, tokens, *engine.update(known_norm=norm))
                if is_updated and (is_logged or is_saved):
                    raise_if_nonfinite_parameters(engine, world=parts.world)
                if is_scaled and (is_logged or is_saved):
                    raise_if_scale_is_exhausted(engine)
            progress.add(result)
            if is_logged:
                self._log(result, step=step, rate=rate)
            else:
                parts.monitor.report(StepDone(step))
            interrupted = self.vote.anyone()
            ended = time.perf_counter()
        progress.exclude_since(ended)
        return interrupted

    def is_end_requested(self) -> bool:
        """Return whether a callback on any rank ends training; call once after a step."""
        return bool(self.parts.callbacks) and self.end_vote.anyone()

    def call_back(self, moment: Moment) -> None:
        """Call the callbacks of the user with the state of the run."""
        parts, progress = self.parts, self.progress
        if not parts.callbacks:
            return
        step = parts.engine.step
        parts.callbacks.call(
            moment,
            step=step,
            steps=parts.config.num_steps,
            epoch=float(self._epochs(step)) if parts.loader.dataset.num_samples else None,
            loss=progress.loss,
            eval_loss=progress.eval_loss,
            metrics=MappingProxyType(progress.metrics),
            checkpoint=progress.checkpoint,
        )

    def evaluate(self) -> None:
        """Report the loss on the held-out data, in total and for each of its parts, and metrics."""
        started = time.perf_counter()
        engine, dataset = self.parts.engine, self.parts.loader.dataset
        held_out, entropy = dataset.info.eval_parts, dataset.info.unigram_entropy
        sums = self._evaluation_sums(self.parts.config.eval_batches)
        means = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
        total, count, *metric_sums = sums.sum(0).tolist()
        loss, metrics = total / max(1.0, count), self._metrics_of(metric_sums)
        progress = self.progress
        progress.eval_loss, progress.metrics, progress.evaluated_at = loss, metrics, engine.step
        progress.evaluations.add({"loss": loss, **metrics}[self.parts.config.best_metric])
        self.parts.monitor.report(
            Evaluated(
                engine.step,
                loss,
                int(count),
                None if entropy is None else entropy(),
                perplexity_of(loss) if counted_in(dataset) == "tokens" else None,
                dict(zip(held_out, means, strict=False)),
                metrics,
            )
        )
        self.call_back("evaluation")
        progress.exclude_since(started)

    def try_metrics(self) -> None:
        """Evaluate a batch with metrics that could not be tried before the start.

        Metrics that fail would end the run at its first evaluation, and its steps would be lost.
        """
        config, dataset = self.parts.config, self.parts.loader.dataset
        is_untried = dataset.kind == "structured" or config.loss is not None
        if self.parts.metrics and is_untried and config.eval_batches:
            started = time.perf_counter()
            self._metrics_of(self._evaluation_sums(1).sum(0)[2:].tolist())
            self.progress.exclude_since(started)

    def _evaluation_sums(self, num_batches: int) -> Tensor:
        """Return sums over all ranks: loss, targets and those of metrics for each held-out part."""
        loader, world = self.parts.loader, self.parts.world
        parts: list[range | None] = [*loader.dataset.info.eval_parts.values()] or [None]
        num_sums = 2 + sum(metric.num_sums for metric in self.parts.metrics)
        sums = torch.zeros(len(parts), num_sums, dtype=torch.float64, device=world.device)
        for number, part in enumerate(parts):
            for batch in loader.eval_batches(num_batches, part=part):
                self._begin("evaluating")
                sums[number] += self.parts.engine.evaluate(batch)
        if world.world_size > 1:
            dist.all_reduce(sums)
        return sums.cpu()

    def _metrics_of(self, sums: Sequence[float]) -> dict[str, float]:
        values = iter(sums)
        return {
            metric.name: metric.compute([*itertools.islice(values, metric.num_sums)])
            for metric in self.parts.metrics
        }

    def save(self, saver: Saver, *, ends_early: bool, is_due: bool, ends: bool) -> None:
        """Save a checkpoint if it is due or training ends, and report completed saves.

        Args:
            saver: Saver that writes the checkpoint.
            ends_early: Whether training ends before its last step.
            is_due: Whether a checkpoint is due at this step.
            ends: Whether training ends.
        """
        parts, engine = self.parts, self.parts.engine
        started = time.perf_counter()
        self._begin("saving")
        if ends_early and not is_due:  # this step's loss and gradients were not checked
            raise_if_nonfinite_parameters(engine, world=parts.world)
        saved = []
        if ends or is_due:
            progress = self.progress
            is_evaluated = progress.evaluated_at == engine.step
            saved = saver.save(
                engine.state_dict(),
                step=engine.step,
                samples=engine.step * parts.config.global_batch_size,
                loss=progress.loss,
                eval_loss=progress.eval_loss if is_evaluated else None,
                metrics=progress.metrics if is_evaluated else {},
                tokens=None if progress.tokens_seen is None else int(progress.tokens_seen),
                best_metric=parts.config.best_metric,
                best_value=progress.evaluations.best,
                evaluations_since=progress.evaluations.since,
                data=parts.loader.state(engine.step),
            )
        for save in [*saved, *(saver.close() if ends else saver.take_completed())]:
            parts.monitor.report(Saved(save.step, str(save.path), save.seconds, save.stalled_s))
            self.progress.checkpoint = save.path
            self.call_back("save")
        self.progress.exclude_since(started)

    def _begin(self, phase: str) -> None:
        self.parts.monitor.report_phase(phase, step=self.parts.engine.step)
        self.stragglers.note(phase)

    def _read(self) -> AnyBatch:
        self._begin("reading")
        began = time.perf_counter()
        batch = next(self.batches)
        self.progress.waited += time.perf_counter() - began
        return batch

    def _epochs(self, step: int) -> Fraction:
        """Return the number of passes over data of known length."""
        loader = self.parts.loader
        samples_read = step * self.parts.config.global_batch_size - loader.first_row_at
        return Fraction(samples_read, loader.dataset.num_samples)

    def _log(self, result: StepResult, *, step: int, rate: float) -> None:
        """Report the values of a step. This waits for the device; steps without a log never do."""
        parts, progress = self.parts, self.progress
        times, slowest = self.stragglers.compare(step=step) or (None, None)
        loads = parts.engine.expert_loads()
        loss, tokens = float(result.loss), int(result.tokens)
        norm = None if result.grad_norm is None else float(result.grad_norm)
        skipped = None if progress.skipped is None else int(progress.skipped)
        seconds, waited, tokens_per_s = progress.begin_interval(loss=loss)
        parts.monitor.report(
            StepLogged(
                step=step,
                loss=loss,
                lr=rate,
                grad_norm=norm,
                tokens=tokens,
                tokens_per_s=tokens_per_s,
                step_s=seconds,
                peak_memory_bytes=peak_memory_bytes(parts.world.device),
                epoch=float(self._epochs(step)) if parts.loader.dataset.num_samples else None,
                tokens_seen=None if progress.tokens_seen is None else int(progress.tokens_seen),
                data_wait_s=waited,
                slowest=slowest,
                skipped=skipped,
                loss_scale=None if skipped is None else parts.engine.loss_scale,
                **self.router_watch.metrics(loads),
                **parts.device_use.read(step_s=seconds),
            )
        )
        if times is not None:
            parts.monitor.report(times)
        for note in self.router_watch.notes(loads, step=step):
            parts.monitor.report(Noted(note))


def _progress(parts: LoopParts) -> _Progress:
    """Return the values at the start of a run, or those in the resumed checkpoint."""
    history, resumed = EvaluationHistory(higher_is_better=parts.higher_is_better), parts.resumed
    if resumed is None:
        return _Progress(evaluations=history)
    if resumed.best_metric == parts.config.best_metric:  # values of another one do not compare
        history.best, history.since = resumed.best_value, resumed.evaluations_since
    return _Progress(loss=resumed.loss, evaluations=history, tokens_seen=resumed.tokens)


def _early_stop_note(evaluations: EvaluationHistory, config: TrainConfig) -> Noted:
    better = "higher" if evaluations.higher_is_better else "lower"
    return Noted(
        f"train.early_stop={config.early_stop}: training ends, because {evaluations.since} "
        f"evaluations found no {better} {config.best_metric} than {evaluations.best:.4f}"
    )
