"""What a node has, and which backends work on it."""
