"""Data sets of the Hugging Face Hub: their splits, and their files in the Hub's cache."""
