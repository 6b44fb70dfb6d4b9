"""Layers divided over a tensor axis."""
