"""Writes checkpoints while training runs."""
