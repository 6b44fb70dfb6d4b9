"""Predicts the first layout of a plan with compiled blocks, which the search itself never sets."""

from __future__ import annotations

from collections.abc import Callable

from axonlaunch.config import ConfigError, RunConfig, with_values
from axonlaunch.planning.records import CompiledLayout
from axonlaunch.planning.search import keys
from axonlaunch.planning.search.rounds import EstimatedLayout

_WORTH = 0.95
"""Longest compiled step, relative to the same step without, for which it is reported."""


def compiled_layout(
    first: EstimatedLayout, *, check: Callable[[RunConfig], RunConfig]
) -> CompiledLayout | None:
    """Return the prediction of a layout with compiled blocks.

    None if blocks are compiled already or can't be, if they save less than 5% of a step, if the
    layout does not fit, or for a CPU, whose compiled kernels have no known speed. Memory is not
    estimated, because that takes 15 CPU seconds; compiled blocks need less.

    Args:
        first: The layout without compiled blocks.
        check: Resolves a run, or raises ``ConfigError`` if no node can run it.
    """
    config, speed = first.config, first.speed
    assert config.hardware is not None
    if config.train.compile or config.hardware.is_cpu or not first.fits:
        return None
    if speed.compiled_s > _WORTH * speed.step_s:
        return None
    try:
        check(with_values(config, {keys.COMPILE: True}))
    except ConfigError:
        return None
    return CompiledLayout([f"{keys.COMPILE}=true"], speed.compiled_s)
