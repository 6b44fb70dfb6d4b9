"""Commands for jobs of SLURM and Kubernetes."""
