"""Validates composed values against the typed configuration."""
