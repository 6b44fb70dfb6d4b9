"""Runs on the nodes of a Ray cluster. Nothing of Ray is imported by ``import axonlaunch``."""
