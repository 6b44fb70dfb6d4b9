"""Ranks started by torchrun, mpirun or srun, and jobs of SLURM, Kubernetes, Ray and clouds."""
