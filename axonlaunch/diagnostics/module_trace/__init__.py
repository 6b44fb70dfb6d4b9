"""Traces of modules: their files, and where two of them part. Who computes them is ``training``."""
