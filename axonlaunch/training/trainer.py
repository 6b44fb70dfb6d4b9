"""The training loop: decides when to train, log, evaluate and save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.datasets.dataset import AnyBatch, counted_in
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.diagnostics.stragglers import Stragglers
from axonlaunch.engines.base import Engine, StepResult
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
from axonlaunch.training.ending.early_stop import EvaluationHistory
from axonlaunch.training.ending.nonfinite import (
    raise_if_nonfinite,
    raise_if_nonfinite_parameters,
    raise_if_scale_is_exhausted,
)
from axonlaunch.training.ending.stop_vote import StopVote
from axonlaunch.training.garbage import GarbageCollection
from axonlaunch.training.measuring.device_use import DeviceUse
from axonlaunch.training.measuring.peak_memory import PeakWatch, peak_memory_bytes
from axonlaunch.training.measuring.profiling import StepProfiler
from axonlaunch.training.module_trace.run import RunTracer


@dataclass
class _Progress:
    """Values accumulated since the last logged step and over the whole run."""

    loss: float | None = None
    eval_loss: float | None = None
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


def fit(
    engine: Engine,
    data: Loader,
    config: TrainConfig,
    *,
    world: World,
    monitor: Monitor,
    watch: PeakWatch,
    profiler: StepProfiler,
    use: DeviceUse,
    tracer: RunTracer | None = None,
    saver: Saver | None = None,
    resumed: Checkpoint | None = None,
    blocks: Sequence[nn.Module] = (),
) -> Finished:
    """Train until the last step, until a rank requests a stop, or until early stopping.

    Every rank calls this.

    Args:
        engine: Engine that trains; it may have done steps already.
        data: Loader of this rank's part of each global batch.
        config: Configuration of the training loop.
        world: The ranks that train.
        monitor: Monitor of this rank. If one of them requests a stop, all ranks stop after the same
            step.
        watch: Measures this rank's peak memory.
        profiler: Profiles the configured steps.
        use: Reads device counters at logged steps.
        tracer: Traces the modules in selected steps; None traces no step.
        saver: Saves checkpoints at its interval; None saves none.
        resumed: Checkpoint from which the engine's state was loaded; None if it has done no step.
        blocks: Blocks of the model on this rank, whose times are compared across ranks with GPUs.
    """
    num_steps = config.num_steps
    if resumed is not None and resumed.data is not None:
        data.resume(resumed.data)
    with (
        closing(data.iterate(engine.step)) as batches,
        closing(Stragglers(world, blocks=blocks)) as stragglers,
        GarbageCollection(config.gc_every) as collection,
    ):
        loop = _Loop(
            engine=engine,
            backward=engine.backward if tracer is None else tracer.backward,
            data=data,
            config=config,
            world=world,
            monitor=monitor,
            watch=watch,
            profiler=profiler,
            use=use,
            batches=batches,
            stragglers=stragglers,
            vote=StopVote(world),
            progress=_progress(resumed),
        )
        is_over = loop.is_exhausted or engine.step >= num_steps
        if config.eval_at_start and config.eval_batches and not engine.step:
            loop.evaluate()
        interrupted = not is_over and _do_steps(loop, saver, collection)
        profiler.finish()
        if is_over and config.eval_batches:  # the earlier run was stopped before this evaluation
            loop.evaluate()
    progress = loop.progress
    done = Finished(
        step=engine.step,
        interrupted=interrupted,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        tokens_per_s=progress.tokens / progress.seconds if progress.seconds else None,
        peak_memory_bytes=watch.peak_bytes(),
    )
    monitor.report(done)
    monitor.report_phase("done", step=engine.step)
    return done


def _do_steps(loop: _Loop, saver: Saver | None, collection: GarbageCollection) -> bool:
    """Train the remaining steps, and evaluate and save when due.

    Returns:
        Whether a requested stop ended training before the last step, and not early stopping.
    """
    config, engine, num_steps = loop.config, loop.engine, loop.config.num_steps
    interrupted = stopped = False
    while engine.step < num_steps and not interrupted and not stopped:
        step = engine.step + 1
        last = step == num_steps
        is_saved = saver is not None and _due(step, saver.every, last=last)
        is_logged = _due(step, config.steps_per_log, last=last) or not loop.progress.started
        interrupted = loop.step(step, is_logged=is_logged, is_saved=is_saved)
        if _due(step, config.eval_every, last=last) and config.eval_batches:
            loop.evaluate()
            if loop.is_exhausted and not last:
                stopped = True
                loop.monitor.report(_early_stop_note(loop.progress.evaluations, config))
        if saver is not None:
            ends_early = interrupted or stopped
            loop.save(saver, ends_early=ends_early, is_due=is_saved, ends=ends_early or last)
        collection.step_done(step)
    return interrupted and not stopped and engine.step < num_steps


@dataclass(kw_only=True)
class _Loop:
    """Parts of the training loop, with a method for each action: step, evaluate, save.

    Attributes:
        backward: ``backward`` of the engine or of the tracer.
        progress: Accumulated values of the run.
    """

    engine: Engine
    backward: Callable[[AnyBatch], tuple[torch.Tensor, torch.Tensor]]
    data: Loader
    config: TrainConfig
    world: World
    monitor: Monitor
    watch: PeakWatch
    profiler: StepProfiler
    use: DeviceUse
    batches: Iterator[AnyBatch]
    stragglers: Stragglers
    vote: StopVote
    progress: _Progress

    @property
    def is_exhausted(self) -> bool:
        """Whether the evaluation loss has not improved for ``train.early_stop`` evaluations."""
        return self.progress.evaluations.is_exhausted(self.config.early_stop)

    def step(self, step: int, *, is_logged: bool, is_saved: bool) -> bool:
        """Train one step; return whether a rank requested a stop."""
        progress = self.progress
        began = time.perf_counter()
        with self.profiler.step(step):
            progress.exclude_since(began)
            self.vote.cast(stop=self.monitor.stop())
            rate = self.engine.learning_rate()
            result = self._train(self._read(), is_logged=is_logged, is_saved=is_saved)
            progress.steps_since += 1
            progress.tokens_since = progress.tokens_since + result.tokens
            if result.skipped is not None:
                previous = progress.skipped
                progress.skipped = result.skipped + (0 if previous is None else previous)
            if progress.tokens_seen is not None:
                progress.tokens_seen = progress.tokens_seen + result.tokens
            if is_logged:
                self._log(result, step=step, rate=rate)
            else:
                self.monitor.report(StepDone(step))
            interrupted = self.vote.anyone()
            ended = time.perf_counter()
        progress.exclude_since(ended)
        return interrupted

    def evaluate(self) -> None:
        """Report the loss on the held-out data, in total and for each of its parts."""
        started = time.perf_counter()
        dataset = self.data.dataset
        parts, entropy = dataset.info.eval_parts, dataset.info.unigram_entropy
        sums = torch.zeros(max(1, len(parts)), 2, dtype=torch.float64, device=self.world.device)
        for number, part in enumerate([*parts.values()] or [None]):
            for batch in self.data.eval_batches(self.config.eval_batches, part=part):
                self._begin("evaluating")
                sums[number] += self.engine.evaluate(batch)
        if self.world.world_size > 1:
            dist.all_reduce(sums)
        sums = sums.cpu()
        means = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
        total, count = sums.sum(0)
        loss = float(total / count.clamp(min=1))
        self.progress.eval_loss, self.progress.evaluated_at = loss, self.engine.step
        self.progress.evaluations.add(loss)
        self.progress.exclude_since(started)
        self.monitor.report(
            Evaluated(
                self.engine.step,
                loss,
                int(count),
                None if entropy is None else entropy(),
                perplexity_of(loss) if counted_in(dataset) == "tokens" else None,
                dict(zip(parts, means, strict=False)),
            )
        )

    def save(self, saver: Saver, *, ends_early: bool, is_due: bool, ends: bool) -> None:
        """Save a checkpoint if it is due or training ends, and report completed saves.

        Args:
            saver: Saver that writes the checkpoint.
            ends_early: Whether training ends before its last step.
            is_due: Whether a checkpoint is due at this step.
            ends: Whether training ends.
        """
        started = time.perf_counter()
        self._begin("saving")
        if ends_early and not is_due:  # this step's loss and gradients were not checked
            raise_if_nonfinite_parameters(self.engine, world=self.world)
        saved = []
        if ends or is_due:
            progress = self.progress
            is_evaluated = progress.evaluated_at == self.engine.step
            saved = saver.save(
                self.engine.state_dict(),
                step=self.engine.step,
                samples=self.engine.step * self.config.global_batch_size,
                loss=progress.loss,
                eval_loss=progress.eval_loss if is_evaluated else None,
                tokens=None if progress.tokens_seen is None else int(progress.tokens_seen),
                best_eval_loss=progress.evaluations.best,
                evaluations_since=progress.evaluations.since,
                data=self.data.state(self.engine.step),
            )
        for save in [*saved, *(saver.close() if ends else saver.take_completed())]:
            self.monitor.report(Saved(save.step, str(save.path), save.seconds, save.stalled_s))
        self.progress.exclude_since(started)

    def _begin(self, phase: str) -> None:
        self.monitor.report_phase(phase, step=self.engine.step)
        self.stragglers.note(phase)

    def _read(self) -> AnyBatch:
        self._begin("reading")
        began = time.perf_counter()
        batch = next(self.batches)
        self.progress.waited += time.perf_counter() - began
        return batch

    def _train(self, batch: AnyBatch, *, is_logged: bool, is_saved: bool) -> StepResult:
        self._begin("stepping")
        with self.watch.step(self.engine):
            loss, tokens = self.backward(batch)
            # fp16 skips updates with gradients that are not finite, and halves its scale.
            is_scaled = PRECISIONS[self.config.precision].needs_loss_scale
            norm = None
            if is_saved or (is_logged and not is_scaled):
                norm = raise_if_nonfinite(
                    self.engine, loss, world=self.world, checks_gradients=not is_scaled
                )
            result = StepResult(loss, tokens, *self.engine.update(known_norm=norm))
            if is_scaled and (is_logged or is_saved):
                raise_if_scale_is_exhausted(self.engine)
            return result

    def _epoch(self, step: int) -> float | None:
        """Return the number of passes over the data; None for streams of unknown length."""
        samples = self.data.dataset.num_samples
        samples_read = step * self.config.global_batch_size - self.data.first_row_at
        return samples_read / samples if samples else None

    def _log(self, result: StepResult, *, step: int, rate: float) -> None:
        """Report the values of a step. This waits for the device; steps without a log never do."""
        progress = self.progress
        times, slowest = self.stragglers.compare(step=step) or (None, None)
        loss, tokens = float(result.loss), int(result.tokens)
        norm = None if result.grad_norm is None else float(result.grad_norm)
        skipped = None if progress.skipped is None else int(progress.skipped)
        seconds, waited, tokens_per_s = progress.begin_interval(loss=loss)
        self.monitor.report(
            StepLogged(
                step=step,
                loss=loss,
                lr=rate,
                grad_norm=norm,
                tokens=tokens,
                tokens_per_s=tokens_per_s,
                step_s=seconds,
                peak_memory_bytes=peak_memory_bytes(self.world.device),
                epoch=self._epoch(step),
                tokens_seen=None if progress.tokens_seen is None else int(progress.tokens_seen),
                data_wait_s=waited,
                slowest=slowest,
                skipped=skipped,
                loss_scale=None if skipped is None else self.engine.loss_scale,
                **self.use.read(step_s=seconds),
            )
        )
        if times is not None:
            self.monitor.report(times)


def _progress(resumed: Checkpoint | None) -> _Progress:
    """Return the values at the start of a run, or those in the resumed checkpoint."""
    if resumed is None:
        return _Progress()
    history = EvaluationHistory(resumed.best_eval_loss, resumed.evaluations_since)
    return _Progress(loss=resumed.loss, evaluations=history, tokens_seen=resumed.tokens)


def _early_stop_note(evaluations: EvaluationHistory, config: TrainConfig) -> Noted:
    return Noted(
        f"train.early_stop={config.early_stop}: training ends, because {evaluations.since} "
        f"evaluations found no lower loss than {evaluations.best:.4f}"
    )


def _due(step: int, every: int, *, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)
