"""Weights in the formats of other tools: safetensors and PEFT."""
