"""Starts, supervises and ends the ranks of this node."""
