"""The precision of a run, from its configuration."""

from __future__ import annotations

import dataclasses

from axonlaunch.config.precision import NUMBER_FORMATS, PRECISIONS, Precision
from axonlaunch.config.schema import RunConfig


def precision_of(config: RunConfig) -> Precision:
    """Return the precision of a run, including its formats of parameters and reductions."""
    return dataclasses.replace(
        PRECISIONS[config.train.precision],
        parameters=NUMBER_FORMATS[config.train.param_dtype],
        reduce=NUMBER_FORMATS[config.strategy.reduce_dtype],
    )
