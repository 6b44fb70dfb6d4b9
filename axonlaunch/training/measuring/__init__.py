"""Measurements during training: device use, memory and profiles."""
