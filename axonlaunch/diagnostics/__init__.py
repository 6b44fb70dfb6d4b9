"""Diagnosis of ranks (hangs, stragglers, collectives), of this node, and reports of runs."""
