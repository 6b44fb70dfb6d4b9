"""Tensor parallelism: parallel layers, plans, and the vocabulary-parallel loss."""
