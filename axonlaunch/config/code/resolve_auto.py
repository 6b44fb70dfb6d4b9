"""Replaces ``auto`` in a configuration by the value that it has on a node, for display.

A run keeps ``auto`` for values that depend on a world that may still change. Values that depend on
the model, or are decided when a run starts (a free name, a free port), stay ``auto`` here too.
"""

from __future__ import annotations

from typing import Any

from axonlaunch.config.consistency.layout import Layout, nodes, num_ranks, resolved, with_backend
from axonlaunch.config.consistency.rules import broken_sizes
from axonlaunch.config.consistency.run_precision import with_precision
from axonlaunch.config.optimization.schedules import ConstantConfig
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.values.plain_values import with_values


def resolve_auto(config: RunConfig, *, accelerators: int) -> RunConfig:
    """Return a configuration with the layout that its run would have on this node.

    Args:
        config: Checked configuration; returned unchanged if its layout is searched
            (``strategy.auto``).
        accelerators: Number of accelerators on this node.

    Raises:
        ConfigError: The batch can't be sharded over the ranks.
    """
    if config.strategy.auto:
        return config
    config = with_backend(resolved(config, accelerators=accelerators), accelerators=accelerators)
    config = with_precision(config)
    if problems := list(broken_sizes(config)):
        raise ConfigError(problems)
    settings: dict[str, Any] = {}
    schedule = config.scheduler
    steps = config.train.steps
    if steps != "auto" and isinstance(schedule, ConstantConfig) and schedule.warmup_ratio is None:
        settings["scheduler.warmup_steps"] = schedule.warmup(steps)
    least, most = nodes(config)
    if least == most:
        layout = Layout.of(config, world_size=num_ranks(config))
        settings["train.micro_batch_size"] = layout.micro_batch_size
        if layout.pipeline > 1:
            settings["strategy.pipeline.stages_per_rank"] = layout.stages_per_rank
            settings["strategy.pipeline.microbatches"] = layout.microbatches_per_round
    return with_values(config, settings)
