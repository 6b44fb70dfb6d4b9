"""Optimizers, their states, and the update step."""
