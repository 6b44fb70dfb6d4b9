"""Descriptions of models for engines, the registry of models, and losses."""
