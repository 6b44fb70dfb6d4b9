"""Reasons why a key needs no counterpart, or has none."""

from __future__ import annotations

LAYOUT_ONLY = "the layout does not change results; strategy=auto searches the fastest one"
REPORTING = "does not change training; loggers, metrics.jsonl and axonlaunch report show a run"
READING = "rows are tokenized once, before the run, and cached"
EXACT_KERNEL = "a kernel for the same computation; torch and transformers choose their own"
NO_PREFERENCES = (
    "losses for preferences, rewards and reinforcement learning are not supported; use trl, or "
    "train.loss with a loss of yours"
)
