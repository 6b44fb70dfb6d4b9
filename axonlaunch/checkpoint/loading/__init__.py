"""Finds, verifies and reads checkpoints."""
