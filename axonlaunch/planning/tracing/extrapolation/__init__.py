"""Extrapolates small traced runs to large ones."""
