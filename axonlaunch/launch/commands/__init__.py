"""Dry runs, several runs of a sweep at once, and the functions for scripts and notebooks."""
