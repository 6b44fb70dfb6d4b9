"""Plain values: YAML, URLs and values of environment variables."""
