"""Configuration keys of a layout that a search sets, unless the user has set them.

This module imports nothing, so that the parent process, which has no torch, can use it.
"""

from __future__ import annotations

KIND = "strategy.data_parallel"
SHARDING = "strategy.fsdp.sharding"
REPLICATE = "strategy.fsdp.replicate"
OFFLOAD = "strategy.fsdp.cpu_offload"
TENSOR = "strategy.tensor.degree"
SEQUENCES = "strategy.tensor.sequence_parallel"
CONTEXT = "strategy.context.degree"
PIPELINE = "strategy.pipeline.degree"
SCHEDULE = "strategy.pipeline.schedule"
MICRO_BATCH = "train.micro_batch_size"
RECOMPUTE = "train.activation_checkpointing"

SEARCHED = (
    KIND,
    SHARDING,
    REPLICATE,
    OFFLOAD,
    TENSOR,
    SEQUENCES,
    CONTEXT,
    PIPELINE,
    SCHEDULE,
    MICRO_BATCH,
    RECOMPUTE,
)
