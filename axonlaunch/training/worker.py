"""Trains one frozen configuration on each rank: builds the data, the engine and the training loop.

This module does not depend on how ranks are started or on how events are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from axonlaunch import checkpoint, data
from axonlaunch.checkpoint import Checkpoint, Retention
from axonlaunch.checkpoint.exchange.base_weights import record_base
from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.checkpoint.format import storage
from axonlaunch.checkpoint.loading.fallback import Resumed, load_newest, put_later_aside
from axonlaunch.checkpoint.loading.reader import find_for_all
from axonlaunch.checkpoint.loading.resume_source import is_of
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.options.training_hooks import is_best_highest
from axonlaunch.config.values.optional_keys import num_data_workers
from axonlaunch.data.datasets.dataset import Dataset, counted_in, sample_inputs
from axonlaunch.data.datasets.describe_rows import describe_rows
from axonlaunch.data.datasets.loader import Loader, rank_loader
from axonlaunch.data.tokenizers.tokenizer import FOLDER as TOKENIZER
from axonlaunch.engines.build import Source, build_engine
from axonlaunch.engines.engine import Engine
from axonlaunch.events import (
    NULL_MONITOR,
    Finished,
    Listener,
    Monitor,
    Noted,
    Started,
)
from axonlaunch.models.build import spec_for
from axonlaunch.models.specs.custom_loss import build_custom_loss
from axonlaunch.models.specs.metrics import build_metrics
from axonlaunch.system.text.units import Counted
from axonlaunch.training.callbacks import build_callbacks
from axonlaunch.training.loggers import RunLoggers
from axonlaunch.training.measuring.device_use import DeviceUse, hardware_of, peak_flops
from axonlaunch.training.measuring.peak_memory import DevicePeak, PeakWatch
from axonlaunch.training.measuring.profiling import StepProfiler
from axonlaunch.training.measuring.system_use import sample_system
from axonlaunch.training.module_trace.run import RunTracer
from axonlaunch.training.process.arithmetic import attention_kernels, configure_arithmetic
from axonlaunch.training.process.start_notes import data_notes, settings_notes
from axonlaunch.training.resumed_rows import place_rows
from axonlaunch.training.trainer import LoopParts, fit


def run(
    config: RunConfig,
    world: World,
    *,
    monitor: Monitor = NULL_MONITOR,
    cpu_peak: Callable[[RunConfig], PeakWatch] | None = None,
) -> Finished:
    """Train a resolved configuration. Every rank of the world calls this.

    Args:
        config: Checked configuration with ``run_dir`` resolved.
        world: The ranks that train.
        monitor: Monitor of this rank. Only that of the main rank receives events.
        cpu_peak: Builds the measurement of peak memory on a CPU; None measures none there.
    """
    monitor.report_phase("building", step=None)
    configure_arithmetic(config.train)
    layout = Layout.of(config, world_size=world.world_size)
    dataset = data.build_dataset(config.data, config.tokenizer)
    loader = rank_loader(
        config,
        dataset,
        layout=layout,
        rank=world.rank,
        pin_memory=world.device.type != "cpu",
        num_workers=num_data_workers(config.data),
    )
    peak_memory = _peak_memory(config, world, cpu_peak)
    source = Source(storing=peak_memory.storing)
    engine = build_engine(config, world, sample=sample_inputs(dataset), source=source)
    monitor.report_phase("loading", step=None)
    resumed = load_run_state(config, engine, world)
    row_notes = place_rows(loader, config, dataset, resumed.checkpoint, world=world)
    report, notes, loggers = _main_rank_outputs(
        monitor.report, resumed.checkpoint, config, world, counted=_unit_of_metrics(config, dataset)
    )
    monitor = dataclasses.replace(monitor, report=report)
    if world.is_main:
        _keep_tokenizer(config, dataset)
    device_use = _device_use(config, engine, dataset, world)
    notes = (
        *dataset.info.notes,
        *notes,
        *_move_superseded_aside(resumed.checkpoint, storage.root(config), world),
        *_remove_partial_saves(storage.root(config), world),
        *settings_notes(config, world),
        *data_notes(config, dataset),
        *row_notes,
        *device_use.notes,
    )
    monitor.report(_started_event(config, engine, dataset, world, resumed=resumed, notes=notes))
    tracer = None
    if config.train.trace.steps:
        tracer = RunTracer(config, engine, world=world, sample=sample_inputs(dataset))
    blocks_of = spec_for(config).blocks
    parts = LoopParts(
        engine=engine,
        loader=loader,
        config=config.train,
        world=world,
        monitor=monitor,
        peak_memory=peak_memory,
        profiler=StepProfiler(config.train.profile, world=world, run_dir=Path(config.run_dir)),
        device_use=device_use,
        tracer=tracer,
        saver=_saver(config, engine, loader, world, resumed=resumed, monitor=monitor),
        save_every=config.checkpoint.every,
        resumed=resumed.checkpoint,
        blocks=[block for module in engine.modules for block in blocks_of(module).values()],
        metrics=build_metrics(config),
        higher_is_better=is_best_highest(config.metrics, config.train.best_metric),
        callbacks=build_callbacks(config, world),
    )
    kernels = attention_kernels(config.train, world.device)
    with (
        loggers,
        _sampled_system(config, world),
        _tokenizing_ahead(config, dataset, world),
        kernels,
    ):
        return fit(parts)


def load_run_state(config: RunConfig, engine: Engine, world: World) -> Resumed:
    """Load the checkpoint to resume from, or initial weights without a checkpoint.

    Checkpoints without frozen weights (those of adapters) need the initial weights too. Every rank
    calls this.
    """
    if not config.saves_frozen:
        load_initial_weights(engine, config, world=world)
    resumed = _restore(config, engine, world)
    if resumed.checkpoint is None and config.saves_frozen:
        load_initial_weights(engine, config, world=world)
    return resumed


def _sampled_system(config: RunConfig, world: World) -> AbstractContextManager[object]:
    """Return a context in which the first rank of each node samples the use of the node."""
    if world.local_rank:
        return nullcontext()
    assert config.launch.nproc != "auto"
    return sample_system(
        Path(config.run_dir),
        rank=world.rank,
        device=world.device,
        ranks=config.launch.nproc,
    )


def _keep_tokenizer(config: RunConfig, dataset: Dataset) -> None:
    """Write the tokenizer to the run folder and to the folder of its checkpoints."""
    if (tokenizer := dataset.info.tokenizer) is not None:
        folders = {Path(config.run_dir), storage.root(config)} if config.checkpoint.every else ()
        for folder in folders:
            tokenizer.keep(folder / TOKENIZER)


def _device_use(config: RunConfig, engine: Engine, dataset: Dataset, world: World) -> DeviceUse:
    """Return the measurement of device use and MFU."""
    return DeviceUse(
        world.device,
        flops_per_step=_flops_per_step(config, engine, dataset),
        peak=peak_flops(config.hardware or hardware_of(world.device), config.train),
        devices=world.world_size,
    )


def _started_event(
    config: RunConfig,
    engine: Engine,
    dataset: Dataset,
    world: World,
    *,
    resumed: Resumed,
    notes: tuple[str, ...],
) -> Started:
    """Return the event for the start of a run."""
    return Started(
        run_dir=config.run_dir,
        layout=str(Layout.of(config, world_size=world.world_size)),
        device=str(world.device),
        parameters=engine.num_parameters,
        samples=dataset.num_samples or None,
        counted=_unit_of_metrics(config, dataset),
        step=engine.step,
        steps=config.train.num_steps,
        resumed_from=str(resumed.checkpoint.path) if resumed.checkpoint else None,
        corrupt=resumed.aside,
        notes=notes,
    )


def _unit_of_metrics(config: RunConfig, dataset: Dataset) -> Counted:
    """Return what the loss counts, which names metrics."""
    loss = build_custom_loss(config.train)
    return counted_in(dataset) if loss is None or loss.counted is None else loss.counted


def _saver(
    config: RunConfig,
    engine: Engine,
    loader: Loader,
    world: World,
    *,
    resumed: Resumed,
    monitor: Monitor,
) -> Saver | None:
    """Return the saver of checkpoints, after describing the run in their folder.

    Return None if the run saves no checkpoints.
    """

    def describe() -> dict[str, Any] | None:
        return describe_rows(config, loader.dataset).to_dict() if world.is_main else None

    if not config.checkpoint.every:
        return None
    root = storage.root(config)
    if world.is_main:
        storage.describe(config)
        # A run that resumes in its own folder was already compared with the recorded base. Hashing
        # all weights of the base takes minutes.
        if resumed.checkpoint is None or not is_of(resumed.checkpoint.path, root):
            record_base(config)
    return Saver(
        root,
        world=world,
        retention=Retention(
            newest=config.checkpoint.keep_last,
            every=config.checkpoint.keep_every_n_steps,
            steps=tuple(every) if isinstance(every := config.checkpoint.every, list) else (),
            best=config.checkpoint.keep_best,
            metric=config.train.best_metric,
            higher_is_better=is_best_highest(config.metrics, config.train.best_metric),
        ),
        layout=str(Layout.of(config, world_size=world.world_size)),
        background=config.checkpoint.async_save,
        wrote=lambda: monitor.report_phase("saving", step=engine.step),
        warn=lambda text: monitor.report(Noted(text)),
        origin=describe,
        first_row_at=loader.first_row_at,
    )


def _tokenizing_ahead(
    config: RunConfig, dataset: Dataset, world: World
) -> AbstractContextManager[object]:
    """Return a context in which one rank of each node tokenizes later shards in advance."""
    tokenizing_ahead = dataset.info.tokenizing_ahead
    if tokenizing_ahead is None or world.local_rank:
        return nullcontext()
    return tokenizing_ahead(config.tokenizer)


def _flops_per_step(config: RunConfig, engine: Engine, dataset: Dataset) -> float | None:
    """Return the model FLOPs of a step for MFU; None if samples are not sequences of tokens.

    All positions count, including padding and positions without a target in the loss, because they
    are computed too.
    """
    if dataset.kind != "tokens":
        return None
    positions = dataset.sample_shape[0]
    return float(config.train.global_batch_size * positions * engine.flops.per_token(positions))


def _peak_memory(
    config: RunConfig, world: World, cpu_peak: Callable[[RunConfig], PeakWatch] | None
) -> PeakWatch:
    """Return the measurement of this rank's peak memory.

    On a CPU, ``cpu_peak`` can't see allocations of compiled kernels and is not used with
    ``train.compile``.
    """
    if cpu_peak is None or world.device.type != "cpu" or config.train.compile:
        return DevicePeak(world.device)
    return cpu_peak(config)


def _restore(config: RunConfig, engine: Engine, world: World) -> Resumed:
    """Load the checkpoint that ``checkpoint.resume`` selects."""
    resume = config.checkpoint.resume
    if resume == "never":
        return Resumed(None, {})
    if resume == "auto":
        resumed = load_newest(
            storage.root(config),
            engine.state_dict,
            world=world,
            skip_corrupt=config.checkpoint.fallback,
        )
    elif (saved := find_for_all(storage.storage_path(resume), world=world)) is not None:
        resumed = Resumed(
            saved, checkpoint.load_checkpoint(saved, engine.state_dict(), world=world)
        )
    else:
        raise checkpoint.CorruptCheckpointError(
            f"{resume}: the complete checkpoint that was found here before the start is gone"
        )
    if resumed.checkpoint is not None:
        engine.load_state_dict(resumed.state)
    return resumed


def _main_rank_outputs(
    report: Listener,
    resumed: Checkpoint | None,
    config: RunConfig,
    world: World,
    *,
    counted: Counted,
) -> tuple[Listener, tuple[str, ...], AbstractContextManager[object]]:
    """Return this rank's event listener, notes about earlier files, and a context for loggers.

    On the main rank the listener writes files and calls ``report``; on other ranks it does nothing.
    """
    if not world.is_main:
        return lambda event: None, (), nullcontext()
    resumed_at = None if resumed is None else resumed.step
    loggers = RunLoggers(
        config,
        world_size=world.world_size,
        resumed_at=resumed_at,
        report=report,
        counted=counted,
    )
    return loggers, loggers.notes, loggers


def _move_superseded_aside(resumed: Checkpoint | None, root: Path, world: World) -> list[str]:
    """Move checkpoints aside that are later than the resumed one, and return notes on them."""
    return put_later_aside(resumed, root) if resumed and world.is_main else []


def _remove_partial_saves(root: Path, world: World) -> list[str]:
    """Delete the files of interrupted saves, and return notes on them."""
    names = checkpoint.sweep_partial(root) if world.is_main else []
    return [f"checkpoints/{name}: deleted (left by an interrupted save)" for name in names]
