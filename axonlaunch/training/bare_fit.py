"""The training loop without loggers, checkpoints and monitor."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.comm import World
from axonlaunch.config.options.recording import ProfileConfig
from axonlaunch.config.schema import TrainConfig
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.engines.engine import Engine
from axonlaunch.events import Evaluated, Event, Monitor, StepLogged
from axonlaunch.training.ending.nonfinite import NotFiniteError
from axonlaunch.training.measuring.device_use import DeviceUse
from axonlaunch.training.measuring.peak_memory import DevicePeak
from axonlaunch.training.measuring.profiling import StepProfiler
from axonlaunch.training.trainer import LoopParts, fit


def bare_fit(
    engine: Engine,
    loader: Loader,
    config: TrainConfig,
    *,
    world: World,
    run_dir: Path,
    resumed: Checkpoint | None = None,
) -> tuple[list[StepLogged], list[Evaluated]]:
    """Train as ``fit`` does. Every rank calls this. A loss that is not finite ends training.

    Args:
        engine: Engine that trains; it may have done steps already.
        loader: Loader of this rank's part of each global batch.
        config: Configuration of the training loop.
        world: The ranks that train.
        run_dir: Run folder; nothing is written to it.
        resumed: Checkpoint from which the engine's state was loaded; None if it has done no step.

    Returns:
        The logged steps and the evaluations that the loop reports on this rank.
    """
    events: list[Event] = []
    with suppress(NotFiniteError):
        fit(
            LoopParts(
                engine=engine,
                loader=loader,
                config=config,
                world=world,
                monitor=Monitor(report=events.append),
                peak_memory=DevicePeak(world.device),
                profiler=StepProfiler(ProfileConfig(), world=world, run_dir=run_dir),
                device_use=DeviceUse(world.device),
                resumed=resumed,
            )
        )
    logged = [event for event in events if isinstance(event, StepLogged)]
    return logged, [event for event in events if isinstance(event, Evaluated)]
