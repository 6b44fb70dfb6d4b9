"""Tensor parallelism: layers, plans, and the loss over a divided vocabulary."""
