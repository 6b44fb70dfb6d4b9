"""Causal language models of the installed transformers: configuration, construction, weights."""
