"""Optimizers, their states, and the update of a training step."""
