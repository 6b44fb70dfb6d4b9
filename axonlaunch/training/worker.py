"""What each rank runs: one frozen configuration in, a trained run out.

It connects the rooms; how ranks were started, and who reads the events, is not its business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from axonlaunch import checkpoint, data
from axonlaunch.checkpoint import Checkpoint, Retention, storage
from axonlaunch.checkpoint.base_weights import record_base
from axonlaunch.checkpoint.fallback import Resumed, load_newest, put_later_aside
from axonlaunch.checkpoint.reader import find_for_all
from axonlaunch.checkpoint.resume_source import is_of
from axonlaunch.checkpoint.saver import Saver
from axonlaunch.checkpoint.weights import load_initial_weights
from axonlaunch.comm import Backend, World
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.dataset import Dataset, sample_inputs
from axonlaunch.data.describe_rows import describe_rows
from axonlaunch.data.loader import Loader, rank_loader
from axonlaunch.data.mix import AnyText
from axonlaunch.data.sharded_rows import ShardedRows
from axonlaunch.data.tokenizer import FOLDER as TOKENIZER
from axonlaunch.engines.base import Engine
from axonlaunch.engines.build import Source, build_engine
from axonlaunch.events import NOBODY, Counted, Finished, Listener, Monitor, Noted, Started
from axonlaunch.models.build import spec_for
from axonlaunch.system import gpus
from axonlaunch.training.arithmetic import attention_kernels, configure_arithmetic
from axonlaunch.training.device_use import DeviceUse, hardware_of, peak_flops
from axonlaunch.training.loggers import RunLoggers
from axonlaunch.training.module_trace.run import RunTracer
from axonlaunch.training.peak_memory import DevicePeak, PeakWatch
from axonlaunch.training.profiling import StepProfiler
from axonlaunch.training.resumed_rows import place_rows
from axonlaunch.training.trainer import fit


def run(
    config: RunConfig,
    world: World,
    *,
    monitor: Monitor = NOBODY,
    cpu_peak: Callable[[RunConfig], PeakWatch] | None = None,
) -> Finished:
    """Train as a resolved configuration says; every rank of the world calls this.

    Args:
        config: Checked, with ``run_dir`` resolved.
        world: Its ranks.
        monitor: Follows this rank; events reach that of the main rank alone.
        cpu_peak: Makes what finds the peak of a CPU's memory; None: it is not found.
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
    )
    watch = _watch(config, world, cpu_peak)
    source = Source(storing=watch.storing)
    engine = build_engine(config, world, sample=sample_inputs(dataset), source=source)
    monitor.report_phase("loading", step=None)
    resumed = load_run_state(config, engine, world)
    row_notes = place_rows(loader, config, dataset, resumed.checkpoint, world=world)
    report, notes, loggers = _on_main(
        monitor.report, resumed.checkpoint, config, world, counted=_counted(dataset)
    )
    monitor = dataclasses.replace(monitor, report=report)
    if world.is_main:
        _keep_tokenizer(config, dataset)
    use = _device_use(config, engine, dataset, world)
    notes = (
        *getattr(dataset, "notes", ()),
        *notes,
        *_put_superseded_aside(resumed.checkpoint, storage.root(config), world),
        *_remove_partial_saves(storage.root(config), world),
        *_notes(config, world),
        *data_notes(config, dataset),
        *row_notes,
        *use.notes,
    )
    monitor.report(_started_event(config, engine, dataset, world, resumed=resumed, notes=notes))
    tracer = None
    if config.train.trace.steps:
        tracer = RunTracer(config, engine, world=world, sample=sample_inputs(dataset))
    profiler = StepProfiler(config.train.profile, world=world, run_dir=Path(config.run_dir))
    saver = _saver(config, engine, loader, world, resumed=resumed, monitor=monitor)
    kernels = attention_kernels(config.train, world.device)
    with loggers, _tokenising_ahead(config, dataset, world), kernels:
        return fit(
            engine,
            loader,
            config.train,
            world=world,
            monitor=monitor,
            watch=watch,
            profiler=profiler,
            use=use,
            tracer=tracer,
            saver=saver,
            resumed=resumed.checkpoint,
            blocks=[
                b for module in engine.modules for b in spec_for(config).blocks(module).values()
            ],
        )


def load_run_state(config: RunConfig, engine: Engine, world: World) -> Resumed:
    """Load the checkpoint to resume from; where there is none, initial weights.

    Checkpoints that leave frozen weights out (an adapter's) need the initial weights under them.
    Every rank calls this.
    """
    if not config.saves_frozen:
        load_initial_weights(engine, config, world=world)
    resumed = _restore(config, engine, world)
    if resumed.checkpoint is None and config.saves_frozen:
        load_initial_weights(engine, config, world=world)
    return resumed


def _keep_tokenizer(config: RunConfig, dataset: Dataset) -> None:
    """Write the tokenizer into the run's folder and beside its checkpoints."""
    if isinstance(dataset, AnyText):
        folders = {Path(config.run_dir), storage.root(config)} if config.checkpoint.every else ()
        for folder in folders:
            dataset.tokenizer.keep(folder / TOKENIZER)


def _device_use(config: RunConfig, engine: Engine, dataset: Dataset, world: World) -> DeviceUse:
    """Return what measures how well devices are used."""
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
    """Return the event that begins a run."""
    return Started(
        run_dir=config.run_dir,
        layout=str(Layout.of(config, world_size=world.world_size)),
        device=str(world.device),
        parameters=engine.num_parameters,
        samples=dataset.num_samples or None,
        counted=_counted(dataset),
        step=engine.step,
        steps=config.train.num_steps,
        resumed_from=str(resumed.checkpoint.path) if resumed.checkpoint else None,
        corrupt=resumed.aside,
        notes=notes,
    )


def _counted(dataset: Dataset) -> Counted:
    """Return what the loss has a target for."""
    return "samples" if dataset.kind == "structured" else dataset.kind


def _saver(
    config: RunConfig,
    engine: Engine,
    loader: Loader,
    world: World,
    *,
    resumed: Resumed,
    monitor: Monitor,
) -> Saver | None:
    """Return what saves checkpoints, whose folder then says what they belong to; None: nothing."""

    def describe() -> dict[str, Any] | None:
        origin = describe_rows(config, loader.dataset) if world.is_main else None
        return None if origin is None else origin.to_dict()

    if not config.checkpoint.every:
        return None
    root = storage.root(config)
    if world.is_main:
        storage.describe(config)
        # Who resumes in its own folder was compared with what is recorded there: to hash all
        # weights of the base takes minutes.
        if resumed.checkpoint is None or not is_of(resumed.checkpoint.path, root):
            record_base(config)
    return Saver(
        root,
        world=world,
        retention=Retention(
            newest=config.checkpoint.keep_last,
            every=config.checkpoint.keep_every_n_steps,
            best=config.checkpoint.keep_best,
        ),
        every=config.checkpoint.every,
        layout=str(Layout.of(config, world_size=world.world_size)),
        background=config.checkpoint.async_save,
        wrote=lambda: monitor.report_phase("saving", step=engine.step),
        warn=lambda text: monitor.report(Noted(text)),
        origin=describe,
        first_row_at=loader.first_row_at,
    )


def _tokenising_ahead(
    config: RunConfig, dataset: Dataset, world: World
) -> AbstractContextManager[object]:
    """Let one rank of each node tokenise what it is not yet time for."""
    if not isinstance(dataset, ShardedRows) or world.local_rank:
        return nullcontext()
    return dataset.tokenising_ahead(config.tokenizer)


def _flops_per_step(config: RunConfig, engine: Engine, dataset: Dataset) -> float | None:
    """Return what MFU counts; None where a sample is no sequence of tokens.

    Padding is computed as any position is, and so are those whose targets the loss leaves out.
    """
    if dataset.kind != "tokens":
        return None
    positions = dataset.sample_shape[0]
    return float(config.train.global_batch_size * positions * engine.flops.per_token(positions))


def _watch(
    config: RunConfig, world: World, cpu_peak: Callable[[RunConfig], PeakWatch] | None
) -> PeakWatch:
    """Return what finds the peak of this rank's memory.

    On a CPU, which has no allocator to ask, nothing sees what compiled kernels allocate.
    """
    if cpu_peak is None or world.device.type != "cpu" or config.train.compile:
        return DevicePeak(world.device)
    return cpu_peak(config)


def _restore(config: RunConfig, engine: Engine, world: World) -> Resumed:
    """Load the checkpoint that the configuration names."""
    resume = config.checkpoint.resume
    if resume == "never":
        return Resumed(None, {})
    if resume == "auto":
        resumed = load_newest(
            storage.root(config),
            engine.state_dict,
            world=world,
            passes_over=config.checkpoint.fallback,
        )
    elif (saved := find_for_all(storage.storage_path(resume), world=world)) is not None:
        resumed = Resumed(
            saved, checkpoint.load_checkpoint(saved, engine.state_dict(), world=world)
        )
    else:
        raise checkpoint.CorruptCheckpointError(
            f"{resume}: there is no complete checkpoint in it any more"
        )
    if resumed.checkpoint is not None:
        engine.load_state_dict(resumed.state)
    return resumed


def _on_main(
    report: Listener,
    resumed: Checkpoint | None,
    config: RunConfig,
    world: World,
    *,
    counted: Counted,
) -> tuple[Listener, tuple[str, ...], AbstractContextManager[object]]:
    """Return what takes events on this rank, what is to be said of earlier files, and the loggers.

    On the main rank those are files and the given listener, on others nothing is.
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


def _put_superseded_aside(resumed: Checkpoint | None, root: Path, world: World) -> list[str]:
    """Put aside what the run saved later than what it resumes from, and name it."""
    return put_later_aside(resumed, root) if resumed and world.is_main else []


def _remove_partial_saves(root: Path, world: World) -> list[str]:
    """Delete what interrupted saves left, and name it."""
    left = checkpoint.sweep_partial(root) if world.is_main else []
    return [
        f"checkpoints/{name}: deleted, a save that was interrupted had left it" for name in left
    ]


def _notes(config: RunConfig, world: World) -> tuple[str, ...]:
    """Say what a setting can't do on this device, or in this world."""
    notes = []
    strategy = config.strategy
    layout = Layout.of(config, world_size=world.world_size)
    is_hybrid = layout.facts.shards_parameters and strategy.fsdp.sharding == "hybrid_shard"
    if is_hybrid and layout.dp_replicate == 1:
        notes.append(
            "strategy.fsdp.sharding=hybrid_shard: there is one replica, as under full_shard; "
            "strategy.fsdp.replicate=2 makes two"
        )
    notes += device_notes(world)
    offload = strategy.fsdp.cpu_offload
    if offload != "none" and world.device.type == "cpu":
        notes.append(
            f"strategy.fsdp.cpu_offload={offload}: the device is the CPU, "
            "so what is offloaded is in host memory already"
        )
    if config.train.profile.memory and world.device.type == "cpu":
        notes.append(
            "train.profile.memory=true: the device is the CPU, which has no allocator whose "
            "history could be recorded"
        )
    if config.train.precision != "fp32" and world.device.type == "cpu":
        notes.append(
            f"train.precision={config.train.precision}: many CPUs have no arithmetic for it, "
            "so it may be slower than fp32"
        )
    return (*notes, *arithmetic_notes(config.train, world.device))


def arithmetic_notes(train: TrainConfig, device: torch.device) -> Iterator[str]:
    """Say that a GPU has faster arithmetic than it is asked for: fp32 is the default of both keys.

    Source: NVIDIA, "A100 Tensor Core GPU Architecture", 2020: TF32 from compute capability 8.0 on.
    """
    is_default = train.precision == "fp32" and train.matmul_precision == "highest"
    if not is_default or device.type != "cuda" or torch.version.hip is not None:
        return
    if torch.cuda.get_device_capability(device) >= (8, 0):
        yield (
            "train.precision=fp32: matrix products run without tensor cores; "
            "train.matmul_precision=high computes them in TF32, train.precision=bf16 in bf16"
        )


def device_notes(world: World) -> Iterator[str]:
    """Say that devices are there and the run is on the CPU, or that ranks share a device."""
    if world.device.type == "cpu" and (devices := gpus.device_count()):
        yield (
            f"launch.device=cpu: the ranks compute on the CPU, and rank 0 sees {devices} "
            f"{'device' if devices == 1 else 'devices'}; a rank for each would use them: "
            f"launch.device=cuda launch.nproc={devices}"
        )
    if world.device.type != "cpu" and world.backend is not Backend.NCCL and world.world_size > 1:
        whose = "are those of all ranks" if world.backend is Backend.MOCK else "are its own"
        yield (
            f"launch.backend={world.backend}: ranks share {world.device} to be debugged on it, "
            f"which is slow; the main rank's memory figures {whose}"
        )


def data_notes(config: RunConfig, dataset: Dataset) -> Iterator[str]:
    """Say that a pretrained model is fed bytes, which are not the tokens that it knows."""
    if config.is_pretrained and dataset.is_text and not isinstance(dataset, AnyText):
        yield (
            f"data={config.data.name}: its tokens are bytes, which are not those that the "
            "pretrained model knows; data=documents reads text by the model's own tokenizer"
        )
