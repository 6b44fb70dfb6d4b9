"""Searches for layouts, and for changes that make a run fit."""
