"""The training loop.

It decides when to step, log, evaluate and save; how is the engine's, the data's and the
checkpoint's.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.checkpoint.saver import Completed, Saver
from axonlaunch.comm import World
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.loader import Loader
from axonlaunch.data.unknown_tokens import naming_unknown_tokens
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
    Straggler,
    perplexity_of,
)
from axonlaunch.training.early_stop import EvaluationHistory
from axonlaunch.training.nonfinite import raise_if_nonfinite
from axonlaunch.training.peak_memory import PeakWatch, peak_memory_bytes


@dataclass
class _Progress:
    """Numbers since the last logged step, and of the whole run."""

    loss: float | None = None
    eval_loss: float | None = None
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    seen: torch.Tensor | int | None = 0
    tokens: int = 0
    seconds: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    steps_since: int = 0
    started: bool = False


def fit(
    engine: Engine,
    data: Loader,
    config: TrainConfig,
    *,
    world: World,
    monitor: Monitor,
    watch: PeakWatch,
    saver: Saver | None = None,
    resumed: Checkpoint | None = None,
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
        saver: Writes checkpoints, as often as it says; None: there are none.
        resumed: What the engine's state was loaded from; None: it has done no step.
    """
    progress = _progress(resumed)
    num_steps = config.num_steps
    stopped = progress.evaluations.is_exhausted(config.early_stop)
    is_over = stopped or engine.step >= num_steps
    interrupted = False
    leaves_out = config.precision == "fp16"  # updates by gradients that are not finite
    with closing(data.iterate(engine.step)) as batches, closing(Stragglers(world)) as stragglers:

        def doing(phase: str) -> None:
            monitor.beat(phase, step=engine.step)
            stragglers.note(phase)

        if config.eval_at_start and config.eval_batches and not engine.step:
            doing("evaluating")
            monitor.report(_evaluate(engine, data, config, progress, world))
        while engine.step < num_steps and not interrupted and not stopped:
            vote = _Vote(world, monitor.stop())
            rate = engine.learning_rate()
            doing("reading")
            batch = next(batches)
            doing("stepping")
            step = engine.step + 1
            last = step == num_steps
            is_logged = _due(step, config.log_every, last=last) or not progress.started
            is_saved = saver is not None and _due(step, saver.every, last=last)
            with watch.step(engine):
                with naming_unknown_tokens(batch, data, step=engine.step):
                    step_loss, tokens = engine.backward(batch)
                if (is_logged or is_saved) and not leaves_out:
                    raise_if_nonfinite(engine, step_loss, world=world)
                result = StepResult(step_loss, tokens, *engine.update())
            progress.steps_since += 1
            if progress.seen is not None:
                progress.seen = progress.seen + tokens
            if is_logged:
                slowest = stragglers.slowest()
                epoch = step * config.global_batch_size / data.dataset.num_samples
                monitor.report(_measured(progress, result, step, rate, world, slowest, epoch))
            else:
                monitor.report(StepDone(step))
            interrupted = vote.anyone()
            if _due(step, config.eval_every, last=last) and config.eval_batches:
                doing("evaluating")
                monitor.report(_evaluate(engine, data, config, progress, world))
                if progress.evaluations.is_exhausted(config.early_stop) and not last:
                    stopped = True
                    monitor.report(_stopped(progress.evaluations, config))
            if saver is not None:
                started = time.perf_counter()
                doing("saving")
                if (interrupted or stopped) and not leaves_out:
                    raise_if_nonfinite(engine, step_loss, world=world)
                ends = interrupted or stopped or last
                if ends or is_saved:
                    _save(saver, engine, config, progress, monitor)
                _report(saver.close() if ends else saver.finished(), monitor)
                _forget_time(progress, started)
            del step_loss, tokens, result  # the next step's peak is its own
        if is_over and config.eval_batches:  # it was stopped after its last save
            doing("evaluating")
            monitor.report(_evaluate(engine, data, config, progress, world))
    speed = progress.tokens / progress.seconds if progress.seconds else None
    done = Finished(
        step=engine.step,
        interrupted=interrupted and not stopped and engine.step < num_steps,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        tokens_per_s=speed,
        peak_memory_bytes=watch.peak_bytes(),
    )
    monitor.report(done)
    monitor.beat("done", step=engine.step)
    return done


def _progress(resumed: Checkpoint | None) -> _Progress:
    """Return the numbers of a run that begins, or that a checkpoint holds."""
    if resumed is None:
        return _Progress()
    history = EvaluationHistory(resumed.best_eval_loss, resumed.evaluations_since)
    return _Progress(loss=resumed.loss, evaluations=history, seen=resumed.tokens)


def _stopped(evaluations: EvaluationHistory, config: TrainConfig) -> Noted:
    return Noted(
        f"train.early_stop={config.early_stop}: training ends, as {evaluations.since} evaluations "
        f"found no lower loss than {evaluations.best:.4f}"
    )


def _measured(
    progress: _Progress,
    result: StepResult,
    step: int,
    rate: float,
    world: World,
    slowest: Straggler | None,
    epoch: float,
) -> StepLogged:
    """Read the step's numbers; this waits for the device, which unlogged steps never do."""
    loss, tokens = float(result.loss), int(result.tokens)
    norm = None if result.grad_norm is None else float(result.grad_norm)
    now = time.perf_counter()
    seconds = (now - progress.since) / progress.steps_since
    if progress.started:  # the first step also pays for what is done once
        progress.tokens += tokens * progress.steps_since
        progress.seconds += seconds * progress.steps_since
    progress.started = True
    progress.loss, progress.since, progress.steps_since = loss, now, 0
    return StepLogged(
        step=step,
        loss=loss,
        lr=rate,
        grad_norm=norm,
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        step_s=seconds,
        peak_memory_bytes=peak_memory_bytes(world.device),
        epoch=epoch,
        tokens_seen=None if progress.seen is None else int(progress.seen),
        slowest=slowest,
    )


def _evaluate(
    engine: Engine, data: Loader, config: TrainConfig, progress: _Progress, world: World
) -> Evaluated:
    started = time.perf_counter()
    parts = getattr(data.dataset, "eval_parts", {})
    sums = torch.zeros(max(1, len(parts)), 2, dtype=torch.float64)
    for number, part in enumerate([*parts.values()] or [None]):
        for batch in data.eval_batches(config.eval_batches, part=part):
            sums[number] += engine.evaluate(batch)
    if world.world_size > 1:
        dist.all_reduce(sums)
    means = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
    total, count = sums.sum(0)
    progress.eval_loss = loss = float(total / count.clamp(min=1))
    progress.evaluations.add(loss)
    _forget_time(progress, started)
    entropy = getattr(data.dataset, "unigram_entropy", None)
    perplexity = perplexity_of(loss) if data.dataset.kind == "tokens" else None
    sources = dict(zip(parts, means, strict=False))
    return Evaluated(engine.step, loss, int(count), entropy, perplexity, sources)


def _save(
    saver: Saver, engine: Engine, config: TrainConfig, progress: _Progress, monitor: Monitor
) -> None:
    saved = saver.save(
        engine.state_dict(),
        step=engine.step,
        samples=engine.step * config.global_batch_size,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        tokens=None if progress.seen is None else int(progress.seen),
        best_eval_loss=progress.evaluations.best,
        evaluations_since=progress.evaluations.since,
    )
    _report(saved, monitor)


def _report(saved: list[Completed], monitor: Monitor) -> None:
    for save in saved:
        monitor.report(Saved(save.step, str(save.path), save.seconds, save.stalled_s))


def _forget_time(progress: _Progress, started: float) -> None:
    """Leave what was not a step out of the time a step takes."""
    progress.since += time.perf_counter() - started


def _due(step: int, every: int, *, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


class _Vote:
    """Whether any rank was asked to stop, summed while the step runs."""

    def __init__(self, world: World, stop: bool) -> None:
        self._asked = torch.tensor(int(stop))
        self._work = dist.all_reduce(self._asked, async_op=True) if world.world_size > 1 else None

    def anyone(self) -> bool:
        """Return the same answer on every rank."""
        if self._work is not None:
            self._work.wait()
        return bool(self._asked)
