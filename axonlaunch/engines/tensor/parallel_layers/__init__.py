"""Layers sharded over a tensor axis."""
