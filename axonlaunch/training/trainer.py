"""The training loop.

It decides when to step, log, evaluate and save; how is the engine's, the data's and the
checkpoint's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.checkpoint.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.dataset import AnyBatch
from axonlaunch.data.loader import Loader
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
from axonlaunch.training.device_use import DeviceUse
from axonlaunch.training.early_stop import EvaluationHistory
from axonlaunch.training.garbage import GarbageCollection
from axonlaunch.training.module_trace.run import RunTracer
from axonlaunch.training.nonfinite import (
    raise_if_nonfinite,
    raise_if_nonfinite_parameters,
    raise_if_scale_is_exhausted,
)
from axonlaunch.training.peak_memory import PeakWatch, peak_memory_bytes
from axonlaunch.training.profiling import StepProfiler
from axonlaunch.training.stop_vote import StopVote


@dataclass
class _Progress:
    """Numbers since the last logged step, and of the whole run."""

    loss: float | None = None
    eval_loss: float | None = None
    evaluated_at: int | None = None
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    seen: torch.Tensor | int | None = 0
    skipped: torch.Tensor | None = None
    tokens_since: torch.Tensor | int = 0
    tokens: int = 0
    seconds: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    steps_since: int = 0
    waited: float = 0.0
    started: bool = False

    def leave_out_since(self, moment: float) -> None:
        """Leave what was not a step, from a moment to now, out of the time a step takes."""
        self.since += time.perf_counter() - moment

    def take_logged(self, *, loss: float) -> tuple[float, float, float]:
        """Take a logged step.

        Returns:
            Seconds of a step since the last one and of its wait for data, and targets a second.
        """
        tokens = int(self.tokens_since)
        now = time.perf_counter()
        seconds = (now - self.since) / self.steps_since
        waited = self.waited / self.steps_since
        if self.started:  # the first step also pays for what is done once
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
    """Train until the last step, or a rank asks to stop, or evaluations get no better.

    Every rank calls this.

    Args:
        engine: Does a step; it may have done some already.
        data: This rank's share of each global batch.
        config: How long, and how often what.
        world: Who takes part.
        monitor: Follows this rank. Where it asks one to stop, all stop after the same step.
        watch: Finds the peak of this rank's memory.
        profiler: Records the steps that it was asked for.
        use: Reads what the device reports, at logged steps.
        tracer: Traces the modules of some steps; None: of no step.
        saver: Writes checkpoints, as often as it says; None: there are none.
        resumed: What the engine's state was loaded from; None: it has done no step.
        blocks: This rank's of the model, by which ranks with GPUs are compared.
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
        if is_over and config.eval_batches:  # it was stopped after its last save
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
    """Do steps until the last, and what is due after each.

    Returns:
        Whether a rank's wish to stop ended them: before the last, and no evaluation did.
    """
    config, engine, num_steps = loop.config, loop.engine, loop.config.num_steps
    interrupted = stopped = False
    while engine.step < num_steps and not interrupted and not stopped:
        step = engine.step + 1
        last = step == num_steps
        is_saved = saver is not None and _due(step, saver.every, last=last)
        is_logged = _due(step, config.log_every, last=last) or not loop.progress.started
        interrupted = loop.step(step, is_logged=is_logged, is_saved=is_saved)
        if _due(step, config.eval_every, last=last) and config.eval_batches:
            loop.evaluate()
            if loop.is_exhausted and not last:
                stopped = True
                loop.monitor.report(_early_stop_note(loop.progress.evaluations, config))
        if saver is not None:
            is_early = interrupted or stopped
            loop.save(saver, is_early=is_early, is_due=is_saved, ends=is_early or last)
        collection.step_done(step)
    return interrupted and not stopped and engine.step < num_steps


@dataclass(kw_only=True)
class _Loop:
    """What each round of the loop does: a step, and what may come after it.

    Attributes:
        backward: The engine's, or what traces it.
        progress: Numbers of the run so far.
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
        """Whether evaluations have got no better for as long as training waits for that."""
        return self.progress.evaluations.is_exhausted(self.config.early_stop)

    def step(self, step: int, *, is_logged: bool, is_saved: bool) -> bool:
        """Do a step; return whether a rank was asked to stop after it."""
        progress = self.progress
        began = time.perf_counter()
        with self.profiler.step(step):
            progress.leave_out_since(began)
            self.vote.cast(stop=self.monitor.stop())
            rate = self.engine.learning_rate()
            result = self._train(self._read(), is_logged=is_logged, is_saved=is_saved)
            progress.steps_since += 1
            progress.tokens_since = progress.tokens_since + result.tokens
            if result.skipped is not None:
                counted = progress.skipped
                progress.skipped = result.skipped + (0 if counted is None else counted)
            if progress.seen is not None:
                progress.seen = progress.seen + result.tokens
            if is_logged:
                self._log(result, step=step, rate=rate)
            else:
                self.monitor.report(StepDone(step))
            interrupted = self.vote.anyone()
            ended = time.perf_counter()
        progress.leave_out_since(ended)
        return interrupted

    def evaluate(self) -> None:
        """Report the loss over what is held out, of each of its parts."""
        started = time.perf_counter()
        dataset = self.data.dataset
        parts = getattr(dataset, "eval_parts", {})
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
        self.progress.leave_out_since(started)
        self.monitor.report(
            Evaluated(
                self.engine.step,
                loss,
                int(count),
                getattr(dataset, "unigram_entropy", None),
                perplexity_of(loss) if dataset.kind == "tokens" else None,
                dict(zip(parts, means, strict=False)),
            )
        )

    def save(self, saver: Saver, *, is_early: bool, is_due: bool, ends: bool) -> None:
        """Save where that is due or training ends, and report what was saved since.

        Args:
            saver: Writes it.
            is_early: Training ends before its last step.
            is_due: As often as configured, it is time to.
            ends: Training ends.
        """
        started = time.perf_counter()
        self._begin("saving")
        if is_early and not is_due:  # the step was not checked
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
                tokens=None if progress.seen is None else int(progress.seen),
                best_eval_loss=progress.evaluations.best,
                evaluations_since=progress.evaluations.since,
                data=self.data.state(self.engine.step),
            )
        for save in [*saved, *(saver.close() if ends else saver.take_completed())]:
            self.monitor.report(Saved(save.step, str(save.path), save.seconds, save.stalled_s))
        self.progress.leave_out_since(started)

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
            # fp16 leaves out updates by gradients that are not finite, and halves its scale.
            is_fp16 = self.config.precision == "fp16"
            norm = None
            if is_saved or (is_logged and not is_fp16):
                norm = raise_if_nonfinite(
                    self.engine, loss, world=self.world, checks_gradients=not is_fp16
                )
            result = StepResult(loss, tokens, *self.engine.update(known_norm=norm))
            if is_fp16 and (is_logged or is_saved):
                raise_if_scale_is_exhausted(self.engine)
            return result

    def _epoch(self, step: int) -> float | None:
        """Return how often the data was seen; None: a stream does not say how long it is."""
        samples = self.data.dataset.num_samples
        seen = step * self.config.global_batch_size - self.data.first_row_at
        return seen / samples if samples else None

    def _log(self, result: StepResult, *, step: int, rate: float) -> None:
        """Report the step's numbers; this waits for the device, which unlogged steps never do."""
        progress = self.progress
        times, slowest = self.stragglers.compare(step=step) or (None, None)
        loss, tokens = float(result.loss), int(result.tokens)
        norm = None if result.grad_norm is None else float(result.grad_norm)
        skipped = None if progress.skipped is None else int(progress.skipped)
        seconds, waited, tokens_per_s = progress.take_logged(loss=loss)
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
                tokens_seen=None if progress.seen is None else int(progress.seen),
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
    """Return the numbers of a run that begins, or that a checkpoint holds."""
    if resumed is None:
        return _Progress()
    history = EvaluationHistory(resumed.best_eval_loss, resumed.evaluations_since)
    return _Progress(loss=resumed.loss, evaluations=history, seen=resumed.tokens)


def _early_stop_note(evaluations: EvaluationHistory, config: TrainConfig) -> Noted:
    return Noted(
        f"train.early_stop={config.early_stop}: training ends, as {evaluations.since} evaluations "
        f"found no lower loss than {evaluations.best:.4f}"
    )


def _due(step: int, every: int, *, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)
