"""Typed configuration of each group: model, data, launch, hardware and others."""
