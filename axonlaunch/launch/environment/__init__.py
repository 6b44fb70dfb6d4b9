"""Describes the node of this process and the launcher that started it."""
