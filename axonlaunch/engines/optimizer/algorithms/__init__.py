"""Optimizers that torch does not have, and updates of whole matrices."""
