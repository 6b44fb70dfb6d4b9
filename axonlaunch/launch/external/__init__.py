"""What another launcher starts: ranks of torchrun, mpirun and srun, and jobs of SLURM."""
