"""Engines: execute a parallelization strategy for a model, behind one interface (``base``)."""
