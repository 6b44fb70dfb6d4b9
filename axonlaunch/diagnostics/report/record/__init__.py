"""A run as its folder records it: events, steps, timeline, and parts of its wall time."""
