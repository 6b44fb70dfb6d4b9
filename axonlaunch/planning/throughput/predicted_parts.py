"""A step's predicted time in the parts of a profiled one, so that they can be laid side by side."""

from __future__ import annotations

from axonlaunch.config import RunConfig
from axonlaunch.planning.throughput.throughput import throughput
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.preflight.checks import resolve_anywhere
from axonlaunch.system import forkserver

_KINDS = {
    "memory-bound": "other kernels",
    "optimizer": "other kernels",
    "host memory": "other kernels",
    "pipeline bubble": "idle",
}


def predicted_parts(config: RunConfig) -> dict[str, float]:
    """Return seconds of a step, as ``plan`` predicts them, by what they go to.

    Args:
        config: A run's, with hardware.

    Raises:
        ConfigError: It can't be traced, or the hardware lacks a figure.
    """
    forkserver.lead_group()  # it forks a process for each trace
    assert config.hardware is not None
    config = resolve_anywhere(replace_with_synthetic(config))
    assert config.hardware is not None
    by_kind: dict[str, float] = {}
    for name, seconds in throughput(config, config.hardware).breakdown.items():
        kind = _KINDS.get(name, name.replace("communication", "exposed communication"))
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    return by_kind
