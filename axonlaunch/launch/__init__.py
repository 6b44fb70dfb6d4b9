"""Starts ranks, watches them, and shows a run; the parent imports no torch."""
