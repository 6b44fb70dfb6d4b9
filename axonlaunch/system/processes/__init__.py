"""Processes: fork server, forked calls and their state."""
