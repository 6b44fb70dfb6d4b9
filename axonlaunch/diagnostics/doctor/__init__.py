"""Diagnosis of this node: hardware, GPU problems, benchmarks, and which backends work."""
