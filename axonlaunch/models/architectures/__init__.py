"""Included architectures: GPT, Llama, MLP and ViT."""
