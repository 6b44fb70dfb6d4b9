"""Predicts the parts of a step's time under the names that a profiled step uses."""

from __future__ import annotations

from axonlaunch.config import RunConfig
from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.planning.records import StepPrediction
from axonlaunch.planning.throughput.step_time import StepTime
from axonlaunch.planning.throughput.step_work import step_work
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.preflight.checks import resolve_anywhere
from axonlaunch.system.processes import forkserver

_KINDS = {
    "memory-bound": "other kernels",
    "optimizer": "other kernels",
    "host memory": "other kernels",
    "pipeline bubble": "idle",
    "host waits": "idle",
    "launches": "idle",
}
_MAX_ACTIONS = 4000
"""Maximum number of actions of a pipeline round to report; a drawing could not show more."""


def predict_step(config: RunConfig) -> StepPrediction:
    """Predict the time of a step in the same way as ``plan``.

    Args:
        config: Configuration of a run, with hardware.

    Raises:
        ConfigError: The run cannot be traced, or the hardware lacks a figure.
    """
    forkserver.lead_group()  # tracing forks processes
    import_plugins(config.plugins)
    config = resolve_anywhere(replace_with_synthetic(config))
    assert config.hardware is not None
    ranks = num_ranks(config)
    times = StepTime(config, Layout.of(config, world_size=ranks), config.hardware)
    work = step_work(config, world_size=ranks)
    by_kind: dict[str, float] = {}
    parts = times.parts(work)
    for name, seconds in parts.items():
        kind = _KINDS.get(name, name.replace("communication", "exposed communication"))
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    timeline = times.pipeline_timeline(work)
    slots = () if timeline is None or len(timeline.slots) > _MAX_ACTIONS else timeline.slots
    pipeline = [(slot.rank, slot.start, slot.stop, str(slot.action)) for slot in slots]
    return StepPrediction(config.hardware.name, parts.total, by_kind, pipeline)
