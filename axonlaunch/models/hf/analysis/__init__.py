"""Structure of a transformers model that parallelism needs."""
