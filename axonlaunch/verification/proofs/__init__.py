"""Proofs of single layouts, and the table of proved Hugging Face layouts."""
