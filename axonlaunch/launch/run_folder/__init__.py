"""The run folder: its name, its start, and what is left of an earlier run in it."""
