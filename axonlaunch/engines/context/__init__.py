"""Context parallelism: sequences divided over ranks."""
