"""Translates configurations of other tools to experiments."""
