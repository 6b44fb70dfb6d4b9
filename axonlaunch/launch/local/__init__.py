"""Ranks of this node: forked, supervised, ended."""
