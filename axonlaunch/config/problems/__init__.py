"""Errors in a configuration and suggestions for unknown names."""
