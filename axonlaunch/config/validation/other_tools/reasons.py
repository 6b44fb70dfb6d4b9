"""Reasons why a key needs no counterpart, or has none."""

from __future__ import annotations

LAYOUT_ONLY = "the layout does not change results; strategy=auto searches the fastest one"
REPORTING = "does not change training; loggers, metrics.jsonl and axonlaunch report show a run"
READING = "rows are tokenised once, before the run, and cached"
EXACT_KERNEL = "a kernel for the same computation; torch and transformers choose their own"
NO_PREFERENCES = (
    "losses for preferences, rewards and reinforcement learning are not supported; use trl, or "
    "train.loss with a loss of yours"
)
NO_QUANTISED_BASE = (
    "a quantised base is not supported, and weights are used as published; "
    "train.param_dtype=bf16 stores them in 2 bytes, strategy=fsdp divides them over devices"
)
