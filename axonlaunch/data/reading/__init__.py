"""Reading of user-defined samples: their random numbers, their errors and worker processes."""
