"""Console output of runs and the files written at their end."""
