"""What a run shows on the console."""
