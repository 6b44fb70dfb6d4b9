"""Included datasets."""
