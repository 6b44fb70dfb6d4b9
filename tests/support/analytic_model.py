"""A small Llama whose work and memory tests compare with the planner's formulas."""

from __future__ import annotations

MODEL = [
    "model=llama_debug",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "data=synthetic_tokens",
    "data.sequence_length=48",
    "train.global_batch_size=16",
    "train.micro_batch_size=2",
    "hardware=cpu",
]
