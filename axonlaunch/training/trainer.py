"""The training loop.

It decides when to step, log, evaluate and save; how is the engine's, the data's and the
checkpoint's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

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
    Saved,
    StepDone,
    StepLogged,
    Straggler,
)
from axonlaunch.training.device_use import DeviceUse
from axonlaunch.training.garbage import GarbageCollection
from axonlaunch.training.nonfinite import raise_if_nonfinite
from axonlaunch.training.peak_memory import PeakWatch, peak_memory_bytes
from axonlaunch.training.profiling import StepProfiler
from axonlaunch.training.stop_vote import StopVote


@dataclass
class _Progress:
    """Numbers since the last logged step, and of the whole run."""

    loss: float | None = None
    eval_loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    steps_since: int = 0
    waited: float = 0.0
    started: bool = False


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
    saver: Saver | None = None,
    loss: float | None = None,
) -> Finished:
    """Train until ``config.steps`` or until a rank asks to stop; every rank calls this.

    Args:
        engine: Does a step; it may have done some already.
        data: This rank's share of each global batch.
        config: How long, and how often what.
        world: Who takes part.
        monitor: Follows this rank. Where it asks one to stop, all stop after the same step.
        watch: Finds the peak of this rank's memory.
        profiler: Records the steps that it was asked for.
        use: Reads what the device reports, at logged steps.
        saver: Writes checkpoints, as often as it says; None: there are none.
        loss: Of the last step that the engine has done; None: it has done none, or it is not known.
    """
    progress = _Progress(loss=loss)
    is_over = engine.step >= config.steps
    interrupted = False
    leaves_out = config.precision == "fp16"  # updates by gradients that are not finite
    vote = StopVote(world)
    with (
        closing(data.iterate(engine.step)) as batches,
        closing(Stragglers(world)) as stragglers,
        GarbageCollection(config.gc_every) as collection,
    ):

        def doing(phase: str) -> None:
            monitor.beat(phase, step=engine.step)
            stragglers.note(phase)

        while engine.step < config.steps and not interrupted:
            step = engine.step + 1
            last = step == config.steps
            is_logged = _due(step, config.log_every, last=last) or not progress.started
            is_saved = saver is not None and _due(step, saver.every, last=last)
            began = time.perf_counter()
            with profiler.step(step):
                _forget_time(progress, began)
                vote.cast(stop=monitor.stop())
                rate = engine.learning_rate()
                doing("reading")
                reading = time.perf_counter()
                batch = next(batches)
                progress.waited += time.perf_counter() - reading
                doing("stepping")
                with watch.step(engine):
                    with naming_unknown_tokens(batch, data, step=engine.step):
                        step_loss, tokens = engine.backward(batch)
                    if (is_logged or is_saved) and not leaves_out:
                        raise_if_nonfinite(engine, step_loss, world=world)
                    result = StepResult(step_loss, tokens, *engine.update())
                progress.steps_since += 1
                if is_logged:
                    times, slowest = stragglers.measured(step=step) or (None, None)
                    monitor.report(_measured(progress, result, step, rate, slowest, use, world))
                    if times is not None:
                        monitor.report(times)
                else:
                    monitor.report(StepDone(step))
                interrupted = vote.anyone()
                ended = time.perf_counter()
            _forget_time(progress, ended)
            if _due(step, config.eval_every, last=last) and config.eval_batches:
                monitor.report(_evaluate(engine, data, config, progress, world, doing))
            if saver is not None:
                started = time.perf_counter()
                doing("saving")
                if interrupted and not leaves_out:
                    raise_if_nonfinite(engine, step_loss, world=world)
                if interrupted or is_saved:
                    _save(saver, engine, config, progress, monitor)
                _report(saver.close() if interrupted or last else saver.finished(), monitor)
                _forget_time(progress, started)
            del step_loss, tokens, result  # the next step's peak is its own
            collection.step_done(step)
        profiler.finish()
        if is_over and config.eval_batches:  # it was stopped after its last save
            monitor.report(_evaluate(engine, data, config, progress, world, doing))
    speed = progress.tokens / progress.seconds if progress.seconds else None
    done = Finished(
        step=engine.step,
        interrupted=interrupted and engine.step < config.steps,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        tokens_per_s=speed,
        peak_memory_bytes=watch.peak_bytes(),
    )
    monitor.report(done)
    monitor.beat("done", step=engine.step)
    return done


def _measured(
    progress: _Progress,
    result: StepResult,
    step: int,
    rate: float,
    slowest: Straggler | None,
    use: DeviceUse,
    world: World,
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
    waited = progress.waited / progress.steps_since
    progress.loss, progress.since, progress.steps_since, progress.waited = loss, now, 0, 0.0
    return StepLogged(
        step=step,
        loss=loss,
        lr=rate,
        grad_norm=norm,
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        step_s=seconds,
        peak_memory_bytes=peak_memory_bytes(world.device),
        data_wait_s=waited,
        slowest=slowest,
        **use.read(tokens_per_s=tokens / seconds),
    )


def _evaluate(
    engine: Engine,
    data: Loader,
    config: TrainConfig,
    progress: _Progress,
    world: World,
    doing: Callable[[str], None],
) -> Evaluated:
    started = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    for batch in data.eval_batches(config.eval_batches):
        doing("evaluating")
        sums += engine.evaluate(batch)
    if world.world_size > 1:
        dist.all_reduce(sums)
    losses, counted = sums.tolist()
    progress.eval_loss = losses / max(1, counted)
    _forget_time(progress, started)
    entropy = getattr(data.dataset, "unigram_entropy", None)
    return Evaluated(engine.step, progress.eval_loss, int(counted), entropy)


def _save(
    saver: Saver, engine: Engine, config: TrainConfig, progress: _Progress, monitor: Monitor
) -> None:
    saved = saver.save(
        engine.state_dict(),
        step=engine.step,
        samples=engine.step * config.global_batch_size,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
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
