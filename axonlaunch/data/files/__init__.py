"""Reads rows from files."""
