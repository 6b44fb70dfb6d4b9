"""Composes a configuration from YAML files and overrides with Hydra."""
