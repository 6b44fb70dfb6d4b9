"""Modules of models: attention, repeated blocks, conversion and state."""
