"""Reasons to end training: no improvement, stop requests, non-finite values."""
