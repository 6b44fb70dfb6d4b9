"""Runs on several nodes: who takes part, and what the nodes say to each other."""
