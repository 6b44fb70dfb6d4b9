"""Estimates a run that is submitted, and how long its nodes need to save a checkpoint."""

from __future__ import annotations

import math
from multiprocessing.context import ForkServerContext

from axonlaunch.config import RunConfig
from axonlaunch.planning.estimate import forecast, resolve_for_node
from axonlaunch.planning.records import Estimate
from axonlaunch.system.text.spinner import spinner

_SAVE_RATE = 100e6
"""Bytes per second at which a node is assumed to write a checkpoint, slower than network storage
usually is.
"""
_END_S = 60
"""Seconds for the end of the current step and the exit of all processes."""


def estimate_submitted(config: RunConfig, context: ForkServerContext) -> Estimate:
    """Estimate a run on the nodes that it is submitted to.

    Args:
        config: Checked configuration with a number in ``launch.nproc``.
        context: Context of the warm fork server.

    Raises:
        ConfigError: The run can't be estimated.
    """
    with spinner("estimating the run, for the memory and the time to save of its job"):
        return forecast(context, resolve_for_node(context, config)).estimate


def seconds_to_save(config: RunConfig, estimate: Estimate) -> int:
    """Return the seconds that a node needs to finish a step and save its part of a checkpoint."""
    assert config.launch.nproc != "auto"
    saved = estimate.saved_bytes + estimate.host_bytes
    return _END_S + math.ceil(saved * config.launch.nproc / _SAVE_RATE)
