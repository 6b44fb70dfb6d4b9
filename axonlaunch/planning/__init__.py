"""Estimates the memory and speed of a run without running it."""
