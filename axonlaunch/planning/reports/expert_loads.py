"""Describes a run under each assumed load of its divided experts, as plain records."""

from __future__ import annotations

import math

from axonlaunch.config import RunConfig, with_values
from axonlaunch.planning.records import Estimate, RoutingForecast, verdict

ROUTINGS = ("balanced", "skewed", "worst")
"""Values of ``estimate.routing``, from the lowest to the highest load."""


def with_routing(config: RunConfig, routing: str) -> RunConfig:
    """Return a run with another value of ``estimate.routing``."""
    return with_values(config, {"estimate.routing": routing})


def routing_forecast(config: RunConfig, estimate: Estimate) -> RoutingForecast:
    """Return whether a run fits under its ``estimate.routing``.

    Args:
        config: Configuration with ``launch.nproc`` resolved.
        estimate: Estimate of this configuration.
    """
    load, hardware = config.estimate.expert_load, config.hardware
    fits = None
    if hardware is not None and hardware.memory_bytes is not None:
        fits = verdict(
            estimate.process_bytes, memory=hardware.memory_bytes, margin=config.estimate.margin
        )
    return RoutingForecast(
        routing=config.estimate.routing,
        # Balanced, each rank has one part in ``degree``; it can't have more than all of them.
        load=None if math.isinf(load) else min(load, config.strategy.expert.degree),
        estimate=estimate,
        verdict=fits,
    )
