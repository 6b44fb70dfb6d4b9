"""Checks of a run that need torch, the model or the data, made before a rank starts."""
