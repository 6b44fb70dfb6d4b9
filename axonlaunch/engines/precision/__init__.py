"""Precision of a training step: types of computation, and loss scaling for fp16."""
