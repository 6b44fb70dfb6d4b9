"""The training loop by itself: no loggers, no checkpoints, nobody who follows it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.comm import World
from axonlaunch.config.recording import ProfileConfig
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.loader import Loader
from axonlaunch.engines.base import Engine
from axonlaunch.events import Evaluated, Event, Monitor, StepLogged
from axonlaunch.training.device_use import DeviceUse
from axonlaunch.training.nonfinite import NotFiniteError
from axonlaunch.training.peak_memory import DevicePeak
from axonlaunch.training.profiling import StepProfiler
from axonlaunch.training.trainer import fit


def bare_fit(
    engine: Engine,
    data: Loader,
    config: TrainConfig,
    *,
    world: World,
    run_dir: Path,
    resumed: Checkpoint | None = None,
) -> tuple[list[StepLogged], list[Evaluated]]:
    """Train as ``fit`` does; every rank calls this, and a loss that is no number ends it.

    Args:
        engine: Does a step; it may have done some already.
        data: This rank's share of each global batch.
        config: How long, and how often what.
        world: Who takes part.
        run_dir: A folder, into which nothing is written.
        resumed: What the engine's state was loaded from; None: it has done no step.

    Returns:
        What the loop reports on this rank.
    """
    events: list[Event] = []
    with suppress(NotFiniteError):
        fit(
            engine,
            data,
            config,
            world=world,
            monitor=Monitor(report=events.append),
            watch=DevicePeak(world.device),
            profiler=StepProfiler(ProfileConfig(), world=world, run_dir=run_dir),
            use=DeviceUse(world.device),
            resumed=resumed,
        )
    logged = [event for event in events if isinstance(event, StepLogged)]
    return logged, [event for event in events if isinstance(event, Evaluated)]
