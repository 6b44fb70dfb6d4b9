"""Fake tensors and the shapes and data flow found by running models on them."""
