"""Finds the first tensor that differs between a layout and the reference."""
