"""Any causal language model of the installed transformers: described, built, read and written."""
