"""Reduces a run to fewer layers and micro-batches and a shorter pipeline, as a configuration.

The other axes are unchanged, so every rank does the same work for a layer and a micro-batch.
"""

from __future__ import annotations

from typing import Any

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.consistency.layout import Layout, settings_for_ranks
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.models.source_of import source_of


def reduced_config(
    config: RunConfig, *, world_size: int, layers: int, micro_batches: int
) -> RunConfig:
    """Return a run with fewer layers, fewer micro-batches and a shorter pipeline.

    All other axes are unchanged, and the world size is adapted.

    Args:
        config: Configuration of the full run.
        world_size: Number of ranks of the full run.
        layers: Number of repeated layers of each stage; 0 keeps all layers. The first stage has the
            leading layers too.
        micro_batches: Number of micro-batches of a rank's step.
    """
    layout = Layout.of(config, world_size=world_size)
    settings: dict[str, Any] = {
        "train.micro_batch_size": layout.micro_batch_size,
        "train.global_batch_size": layout.micro_batch_size * micro_batches * layout.data_ranks,
        "train.compile": False,
        "train.optimizer_in_backward": False,  # the same work in another order
    }
    stages, leading = 1, source_of(config).scaled_sizes().leading if layers else 0
    if layout.pipeline > 1:
        per_rank = min(2, layout.stages_per_rank)
        stages = 2 * per_rank
        settings |= {
            "strategy.pipeline.degree": 2,
            "strategy.pipeline.schedule": _short_schedule(
                layout.schedule, stages_per_rank=per_rank
            ),
            "strategy.pipeline.stages_per_rank": per_rank,
            "strategy.pipeline.split": [leading + layers, *[layers] * (stages - 1)],
            "strategy.pipeline.microbatches": "auto",
        }
        world_size = 2 * world_size // layout.pipeline
    if layers:
        settings |= source_of(config).with_blocks(leading + layers * stages)
    return with_values(config, {**settings, **settings_for_ranks(world_size)})


def _short_schedule(schedule: str, *, stages_per_rank: int) -> Any:
    """Return a schedule for two ranks that does the same work, possibly in another order."""
    if stages_per_rank == 1 and not SCHEDULES[schedule].separate_weight_grad:
        return "gpipe"
    return (
        "interleaved_zero_bubble"
        if SCHEDULES[schedule].separate_weight_grad
        else "interleaved_1f1b"
    )
