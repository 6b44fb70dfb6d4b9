"""Numerical parity of a layout with a single process."""
