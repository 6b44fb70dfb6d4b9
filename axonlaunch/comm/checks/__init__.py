"""Checks of arguments and of matching calls on all ranks."""
