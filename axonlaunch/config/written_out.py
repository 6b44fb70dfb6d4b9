"""A configuration with the values that ``auto`` stands for on a node, for who reads it.

A run itself keeps ``auto`` where its world may still change. What depends on the model, or is only
decided as a run starts (a free name, a free port), stays ``auto``.
"""

from __future__ import annotations

from typing import Any

from axonlaunch.config.errors import ConfigError
from axonlaunch.config.layout import Layout, nodes, num_ranks, resolved, with_backend
from axonlaunch.config.plain import with_values
from axonlaunch.config.rules import broken_sizes
from axonlaunch.config.schema import RunConfig


def written_out(config: RunConfig, *, accelerators: int) -> RunConfig:
    """Return a configuration as a run of it would be laid out.

    Args:
        config: Checked; where its layout is to be planned it is returned as it is.
        accelerators: How many this node has.

    Raises:
        ConfigError: So many ranks can't share the batch.
    """
    if config.strategy.auto:
        return config
    config = with_backend(resolved(config, accelerators=accelerators), accelerators=accelerators)
    if problems := list(broken_sizes(config)):
        raise ConfigError(problems)
    settings: dict[str, Any] = {}
    if config.train.steps != "auto" and config.scheduler.warmup_ratio is None:
        settings["scheduler.warmup_steps"] = config.scheduler.warmup(config.train.steps)
    least, most = nodes(config)
    if least == most:
        layout = Layout.of(config, world_size=num_ranks(config))
        settings["train.micro_batch_size"] = layout.micro_batch_size
        if layout.pipeline > 1:
            settings["strategy.pipeline.stages_per_rank"] = layout.stages_per_rank
            settings["strategy.pipeline.microbatches"] = layout.microbatches_per_round
    return with_values(config, settings)
