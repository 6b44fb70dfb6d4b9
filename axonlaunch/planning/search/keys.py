"""The keys of a layout that a search sets; one that the user has set stays as it is.

They are names alone, for the parent too, which has no torch.
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
