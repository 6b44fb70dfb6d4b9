"""Runs on several nodes: membership of nodes and the messages between them."""
