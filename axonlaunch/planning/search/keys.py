"""Configuration keys of a layout that a search sets, unless the user has set them.

This module does not import torch, so that the parent process can use it.
"""

from __future__ import annotations

from axonlaunch.config.axes import INNER, OUTER

KIND = "strategy.data_parallel"
SHARDING = "strategy.fsdp.sharding"
REPLICATE = "strategy.fsdp.replicate"
OFFLOAD = "strategy.fsdp.cpu_offload"
TENSOR = "strategy.tensor.degree"
SEQUENCES = "strategy.tensor.sequence_parallel"
SCHEDULE = "strategy.pipeline.schedule"
STAGES = "strategy.pipeline.stages_per_rank"
EXPERT_RANKS = "strategy.expert.degree"
MICRO_BATCH = "train.micro_batch_size"
RECOMPUTE = "train.activation_checkpointing"
LOSS_CHUNK = "train.loss_chunk"
COMPILE = "train.compile"
WEIGHTS = "train.param_dtype"
MASTERS = "optimizer.master_weights"
STATES = "optimizer.state_dtype"
PRODUCTS = "train.matmul_dtype"

SEARCHED = (
    KIND,
    SHARDING,
    REPLICATE,
    OFFLOAD,
    TENSOR,
    SEQUENCES,
    *(axis.key for axis in reversed((*OUTER, *INNER)) if axis.key != TENSOR),
    EXPERT_RANKS,
    SCHEDULE,
    STAGES,
    MICRO_BATCH,
    RECOMPUTE,
    LOSS_CHUNK,
)
CHUNK = 1024
"""Value of ``LOSS_CHUNK`` to search and to suggest."""

LOW_PRECISION = "low_precision"
ALLOWABLE = {LOW_PRECISION: (WEIGHTS, MASTERS, STATES, PRODUCTS)}
"""Keys that a search sets only if the user allows it, by the word that allows them."""
