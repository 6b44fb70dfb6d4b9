"""Ranks started by torchrun, mpirun or srun, and SLURM jobs."""
