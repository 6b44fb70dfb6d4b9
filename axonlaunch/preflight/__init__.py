"""Checks that need torch, the model or the data, and that run before a rank starts."""
