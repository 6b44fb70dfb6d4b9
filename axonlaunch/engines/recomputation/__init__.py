"""Recomputation of activations in backward, and the inputs of blocks that it starts from."""
