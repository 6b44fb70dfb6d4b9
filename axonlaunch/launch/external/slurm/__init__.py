"""Runs as jobs of SLURM."""
