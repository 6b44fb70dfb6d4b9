"""Commands for jobs of SLURM, Kubernetes and Ray."""
