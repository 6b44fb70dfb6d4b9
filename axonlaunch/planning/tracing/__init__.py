"""A training step traced on fake tensors in a fake world."""
