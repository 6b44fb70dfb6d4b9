"""Finds out why a run failed: root cause among the ranks' reports, hangs, and hints."""
