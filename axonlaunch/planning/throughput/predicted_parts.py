"""A step's predicted time in the parts of a profiled one, so that they can be laid side by side."""

from __future__ import annotations

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.config.plugins import import_plugins
from axonlaunch.planning.records import StepPrediction
from axonlaunch.planning.throughput.step_time import StepTime
from axonlaunch.planning.throughput.step_work import step_work
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.preflight.checks import resolve_anywhere
from axonlaunch.system import forkserver

_KINDS = {
    "memory-bound": "other kernels",
    "optimizer": "other kernels",
    "host memory": "other kernels",
    "pipeline bubble": "idle",
}
_MOST_ACTIONS = 4000
"""Of a pipeline's round: more than that can't be distinguished on a page."""


def predict_step(config: RunConfig) -> StepPrediction:
    """Predict a step's time, as ``plan`` does.

    Args:
        config: A run's, with hardware.

    Raises:
        ConfigError: It can't be traced, or the hardware lacks a figure.
    """
    forkserver.lead_group()  # it forks a process for each trace
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
    slots = () if timeline is None or len(timeline.slots) > _MOST_ACTIONS else timeline.slots
    pipeline = [(slot.rank, slot.start, slot.stop, str(slot.action)) for slot in slots]
    return StepPrediction(config.hardware.name, parts.total, by_kind, pipeline)
