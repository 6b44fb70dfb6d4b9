"""Ranks that another launcher started: torchrun, mpirun, srun."""
